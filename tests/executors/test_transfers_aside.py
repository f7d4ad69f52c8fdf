"""What goes aside, and which parked loads are under way."""

import numpy as np
import pytest

from strata_jax.executors import protocol, transfers_aside, watcher


def backup(evicts=False):
  return protocol.BackupWork(
    transfer_id=4, node_ids=(), device_slots=np.zeros(1, np.int32),
    host_slots=np.zeros(1, np.int32), tokens=4, evicts=evicts,
  )  # fmt: skip


def load(transfer_id):
  return protocol.LoadWork(
    transfer_id=transfer_id, request_id=0, node_ids=(), host_slots=np.zeros(1, np.int32),
    device_slots=np.zeros(1, np.int32), tokens=4,
  )  # fmt: skip


class Copies:
  """Side copies that end when they are told."""

  def __init__(self, *args, **how):
    self.jobs = []

  def start(self, host_slots, device_slots, done, ready=lambda: None):
    self.jobs.append((done, ready))


def make(monkeypatch, loads, backups):
  monkeypatch.setattr(transfers_aside.side_copies, "SideCopies", Copies)
  events = watcher.Watcher()
  return events, transfers_aside.TransfersAside(
    loads, backups, fragments=lambda way: way, staged=lambda: pytest.fail("not wanted"),
    events=events, now_s=lambda: 7.0,
  )  # fmt: skip


def test_nothing_goes_aside_where_no_way_is_given(monkeypatch):
  _, aside = make(monkeypatch, None, None)
  assert not aside.takes_loads
  assert not aside.takes(backup())
  assert not aside.any_under_way({1, 2})


def test_a_load_is_under_way_until_it_is_taken(monkeypatch):
  events, aside = make(monkeypatch, "copy_engine", "copy_engine")
  assert aside.takes_loads
  assert aside.takes(backup())
  assert not aside.takes(backup(evicts=True))
  aside.start_load(load(1))
  aside.start_load(load(2))
  (done, _), _ = aside._loads.jobs
  done(None)
  assert events.wait(None) == [protocol.LoadDone(1, 7.0)]
  assert aside.any_under_way({1})
  aside.taken(1)
  assert not aside.any_under_way({1, 5})
  assert aside.any_under_way({1, 2})


def test_an_error_is_raised_by_whoever_waits(monkeypatch):
  events, aside = make(monkeypatch, None, "memcpy_async")
  aside.start_backup(backup())
  ((done, _),) = aside._backups.jobs
  done(RuntimeError("CUDA error 700"))
  with pytest.raises(RuntimeError, match="CUDA error 700"):
    events.wait(None)
