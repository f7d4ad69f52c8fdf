"""Programs are compiled ahead, in threads, and then no more."""

import collections
import threading
import time

import jax
import numpy as np
import pytest

from strata_jax.executors import programs, warm_up
from tests.executors import driver, test_overlap

TRANSFERS = {"jit(load)", "jit(store)", "jit(load_layer)", "jit(marker)"}  # not ahead, or pools'


@pytest.fixture
def compiled():
  """Names of the programs that are compiled, as JAX reports them."""
  names = []

  def listen(event, duration_secs, *, fun_name="", **_):
    del duration_secs
    if event == programs._COMPILE_EVENT:
      names.append(fun_name)

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


def make_executor(**options):
  config, params = test_overlap.model(3)
  return driver.make_executor(
    config, params, 4, device_pages=16, host_pages=16, context=64, chunks=(8,), joint_tokens=8,
    **options,
  )  # fmt: skip


def warm(executor, compiled, threads):
  """What was told, and the names of what was compiled by then, in a process that has nothing."""
  seen, counts = [], []

  def progress(*told):
    seen.append(told)
    counts.append(len(compiled))

  jax.clear_caches()
  compiled.clear()
  executor.warmup(progress, threads=threads)
  return seen, counts


@pytest.mark.parametrize(
  ("overlap", "layers_per_program"), [("whole", (2,)), ("layer", (1,)), ("layer", (1, 2))]
)
def test_what_is_compiled_ahead_is_not_compiled_again(compiled, overlap, layers_per_program):
  executor = make_executor(overlap=overlap, layers_per_program=layers_per_program)
  buckets = executor.buckets
  shapes, joint = len(buckets.shapes), len(buckets.joint_shapes)
  expected = collections.Counter(
    {
      "jit(_layer)": shapes,
      "jit(_layers)": shapes * (2 in layers_per_program),
      "jit(layer_after_load)": shapes * (overlap == "layer"),
      "jit(_joint_layers)": joint * len({*layers_per_program, 1}),  # the last of 3 is alone
      "jit(_head)": shapes,
      "jit(enter)": shapes,
      "jit(marker)": shapes,
      "jit(_unpack)": shapes,
      "jit(_next)": len({rows for rows, _ in buckets.shapes}),
    }
  )
  seen, counts = warm(executor, compiled, 4)
  ahead = expected.total()
  assert seen[ahead][0] == ahead
  assert collections.Counter(compiled[: counts[ahead]]) == +expected
  then = compiled[counts[ahead] :]
  assert set(then) <= TRANSFERS
  assert then.count("jit(marker)") == 1  # of a pool
  assert executor.warmup_compilations == len(compiled)
  everything = collections.Counter(compiled)
  assert not np.any(executor.device_pool)
  drive = driver.Driver(executor, 4)
  ids = drive.generate(0, list(range(30)), 5, np.arange(16))
  assert executor.recompiles == 0

  executor = make_executor(overlap=overlap, layers_per_program=layers_per_program)
  warm(executor, compiled, 1)
  assert collections.Counter(compiled) == everything
  drive = driver.Driver(executor, 4)
  assert drive.generate(0, list(range(30)), 5, np.arange(16)) == ids


@pytest.mark.parametrize("threads", [1, 3])
def test_progress_counts_every_program_once(compiled, threads):
  seen, _ = warm(make_executor(), compiled, threads)
  done, totals, names = zip(*seen, strict=True)
  assert done[0] == 0
  assert list(done) == sorted(done)
  assert set(done) == set(range(totals[0] + 1))
  assert set(totals) == {done[-1]}
  assert names[-1] == "done"


def test_less_than_one_thread():
  with pytest.raises(ValueError, match="threads of a warm-up: expected at least 1, got 0"):
    make_executor().warmup(threads=0)


class Fake:
  """A program whose compilation does something."""

  def __init__(self, compile_):
    self.compile = compile_


def test_threads_compile_at_once():
  together, done = threading.Barrier(3, timeout=10), []
  lowers = [(str(index), lambda: Fake(together.wait)) for index in range(3)]
  warm_up.compile_ahead(lowers, 3, done.append)
  assert sorted(done) == ["0", "1", "2"]


def test_an_error_of_a_thread_is_raised_at_once_and_nothing_begins_after_it():
  begun, done = [], []
  all_wait, goes_on = threading.Event(), threading.Event()

  def slow():
    begun.append(1)
    goes_on.wait(5)

  def fails():
    all_wait.wait(5)
    raise MemoryError("no room for a program")

  lowers = [("slow", lambda: Fake(slow)), ("fails", lambda: Fake(fails))]
  lowers += [("late", lambda: Fake(slow))] * 3
  lowers += [("last", lambda: all_wait.set() or Fake(slow))]
  started_s = time.monotonic()
  with pytest.raises(MemoryError, match="no room for a program"):
    warm_up.compile_ahead(lowers, 2, done.append)
  assert time.monotonic() - started_s < 4  # the slow one is still under way
  goes_on.set()
  time.sleep(0.1)
  assert len(begun) <= 2  # the thread that failed may have begun another before the news of it
  assert done == []


def test_an_error_while_compiling_is_raised_as_it_is(monkeypatch):
  executor = make_executor()

  def fails(*_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

  monkeypatch.setattr(jax.stages.Lowered, "compile", fails)
  with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED: out of memory"):
    executor.warmup(threads=2)
  monkeypatch.undo()
  executor.warmup(threads=2)  # the pools are there
  assert executor.recompiles == 0


class SlowInt(int):
  """Lets other threads run while it is added to."""

  def __add__(self, other):
    time.sleep(0.002)
    return SlowInt(int(self) + other)


def test_the_counter_counts_what_threads_compile_at_once():
  counter = programs.CompileCounter()
  counter.count = SlowInt(0)
  listen = lambda: counter._listen(programs._COMPILE_EVENT, 0.1, fun_name="jit(f)")
  threads = [threading.Thread(target=listen) for _ in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert counter.count == 8
