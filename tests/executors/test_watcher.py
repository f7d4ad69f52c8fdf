import gc
import threading
import time

import pytest

from strata_jax.executors import protocol, watcher


def done(transfer_id):
  return lambda: protocol.LoadDone(transfer_id, 0.0)


def test_events_come_in_the_order_of_the_points():
  watch, gate = watcher.Watcher(), threading.Event()
  watch.add(gate.wait, done(1))
  watch.add(lambda: None, lambda: None, gives_event=False)
  watch.add(lambda: None, done(2))
  assert watch.wait(0.01) == []
  gate.set()
  got = []
  while len(got) < 2:
    got += watch.wait(None)
  assert [event.transfer_id for event in got] == [1, 2]
  with pytest.raises(RuntimeError, match="nothing is under way"):
    watch.wait(None)


def test_wait_sleeps_until_the_time_when_nothing_comes():
  watch = watcher.Watcher()
  started = time.perf_counter()
  assert watch.wait(0.05) == []
  assert time.perf_counter() - started >= 0.05
  assert watch.wait(0.0) == []


def test_it_knows_whether_an_event_is_to_come():
  watch = watcher.Watcher()
  assert not watch.is_busy
  watch.add(lambda: None, lambda: None, gives_event=False)
  assert not watch.is_busy
  watch.expect(1)
  assert watch.is_busy
  watch.post(done(1)())
  assert watch.is_busy
  watch.wait(None)
  assert not watch.is_busy


def test_an_error_is_raised_and_stays():
  watch = watcher.Watcher()

  def fail():
    raise ValueError("device lost")

  watch.add(fail, done(1))
  for _ in range(2):
    with pytest.raises(ValueError, match="device lost"):
      watch.wait(None)


def test_the_thread_ends_with_its_owner():
  before = set(threading.enumerate())
  watch = watcher.Watcher()
  (thread,) = set(threading.enumerate()) - before
  del watch
  gc.collect()
  thread.join(10)
  assert not thread.is_alive()
