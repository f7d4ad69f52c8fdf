"""Threads between a page store and the host pool: events, faults, keys."""

import queue
import threading
import time

import numpy as np
import pytest

from strata_jax.executors.protocol import (
  LookUpDone,
  LookUpWork,
  PrefetchDone,
  PrefetchWork,
  SpillDone,
  SpillHanded,
  SpillWork,
)
from strata_jax.executors.storage_io import StorageIo
from strata_jax.page_keys import page_keys, root_key
from strata_jax.tiers.faulty_store import Faults, FaultyStore
from strata_jax.tiers.memory_store import MemoryStore

PAGE_SIZE, PAGE_BYTES, SLOTS = 4, 64, 16
ROOT = root_key("model")


class Io:
  """A StorageIo over a memory store, its host pool, and the events that came."""

  def __init__(self, faults: Faults | None = None):
    self.store = MemoryStore(page_bytes=PAGE_BYTES)
    self.pool = np.random.default_rng(0).integers(0, 256, (SLOTS, PAGE_BYTES), np.uint8)
    self.events: queue.SimpleQueue = queue.SimpleQueue()
    store = self.store if faults is None else FaultyStore(self.store, faults)
    self.io = StorageIo(
      store, self.pool, page_size=PAGE_SIZE, now_s=time.monotonic, post=self.events.put
    )

  def do(self, work, events: int = 1) -> list:
    self.io.submit(work)
    return [self.events.get(timeout=60) for _ in range(events)]

  def fill(self, tokens: np.ndarray) -> np.ndarray:
    """Puts the pages of a prompt into the store; uint8 [pages, page_bytes]."""
    keys = page_keys(ROOT, tokens, PAGE_SIZE)
    pages = np.random.default_rng(int(tokens[0])).integers(
      0, 256, (len(keys), PAGE_BYTES), np.uint8
    )
    self.store.write(keys, pages)
    return pages


@pytest.fixture
def make():
  made = []

  def make_io(faults: Faults | None = None) -> Io:
    made.append(Io(faults))
    return made[-1]

  yield make_io
  for each in made:
    each.io.close()


def tokens(pages: int, first: int = 1) -> np.ndarray:
  return np.arange(first, first + pages * PAGE_SIZE, dtype=np.int32)


def look_up(ids: np.ndarray, work_id: int = 0, skip: int = 0, parent: bytes = ROOT) -> LookUpWork:
  return LookUpWork(
    work_id=work_id, request_id=7, parent_key=parent, token_ids=ids, skip_pages=skip
  )


def slots(*entries: int) -> np.ndarray:
  return np.array(entries, np.int32)


def test_a_look_up_counts_pages_in_a_row(make):
  io = make()
  io.fill(tokens(5))
  (event,) = io.do(look_up(tokens(8)))
  assert (type(event), event.work_id, event.pages) == (LookUpDone, 0, 5)
  assert io.do(look_up(tokens(8), skip=3))[0].pages == 2
  later = page_keys(ROOT, tokens(2), PAGE_SIZE)[-1]
  assert io.do(look_up(tokens(8)[2 * PAGE_SIZE :], parent=later))[0].pages == 3
  assert io.do(look_up(tokens(8), parent=root_key("other")))[0].pages == 0


def test_pages_go_to_their_slots_and_nowhere_else(make):
  io = make()
  pages = io.fill(tokens(5))
  before = io.pool.copy()
  asked = look_up(tokens(5))
  work = PrefetchWork(work_id=1, look_up=asked, first_page=2, host_slots=slots(9, 3, 4))
  (event,) = io.do(work)
  assert (type(event), event.work_id, event.pages) == (PrefetchDone, 1, 3)
  np.testing.assert_array_equal(io.pool[[9, 3, 4]], pages[2:])
  others = np.setdiff1d(np.arange(SLOTS), [9, 3, 4])
  np.testing.assert_array_equal(io.pool[others], before[others])


def test_a_lost_page_ends_what_came(make):
  io = make()
  io.fill(tokens(5))
  io.store.delete([page_keys(ROOT, tokens(5), PAGE_SIZE)[3]])
  work = PrefetchWork(
    work_id=1, look_up=look_up(tokens(5)), first_page=1, host_slots=slots(0, 1, 2, 3)
  )
  assert io.do(work)[0].pages == 2


def test_ids_of_work_may_come_again(make):
  """Another controller over the same executor counts from 0 again."""
  io = make()
  for first in (1, 500, 900):
    pages = io.fill(tokens(3, first))
    asked = look_up(tokens(3, first), work_id=0)
    assert io.do(asked)[0].pages == 3
    io.do(PrefetchWork(work_id=1, look_up=asked, first_page=0, host_slots=slots(0, 1, 2)))
    np.testing.assert_array_equal(io.pool[:3], pages)


def test_keys_are_made_again_when_many_look_ups_came_between(make):
  io = make()
  pages = io.fill(tokens(3))
  asked = look_up(tokens(3))
  io.do(asked)
  for i in range(200):
    io.do(look_up(tokens(1, 1000 + i), work_id=i))
  assert len(io.io._keys) <= 65
  io.do(PrefetchWork(work_id=1, look_up=asked, first_page=0, host_slots=slots(5, 6, 7)))
  np.testing.assert_array_equal(io.pool[5:8], pages)


def test_a_spill_is_handed_over_then_durable(make):
  io = make()
  work = SpillWork(
    work_id=3, parent_key=ROOT, token_ids=tokens(4), skip_pages=1, host_slots=slots(8, 2, 5)
  )
  handed, done = io.do(work, events=2)
  keys = page_keys(ROOT, tokens(4), PAGE_SIZE)
  assert (type(handed), handed.work_id, handed.last_key) == (SpillHanded, 3, keys[-1])
  assert (type(done), done.work_id, done.ok) == (SpillDone, 3, True)
  assert io.store.contains(keys).tolist() == [False, True, True, True]
  for key, slot in zip(keys[1:], (8, 2, 5), strict=True):
    np.testing.assert_array_equal(io.store.peek(key), io.pool[slot])


def test_refused_writes_are_answers_and_one_warning(make, caplog):
  io = make(Faults(read_only=True))
  for work_id in range(3):
    work = SpillWork(
      work_id=work_id, parent_key=ROOT, token_ids=tokens(1), skip_pages=0, host_slots=slots(0)
    )
    handed, done = io.do(work, events=2)
    assert (handed.work_id, done.work_id, done.ok) == (work_id, work_id, False)
  assert [record.levelname for record in caplog.records].count("WARNING") == 1


@pytest.mark.parametrize("method", ["longest_prefix", "read", "write"])
def test_a_store_that_raises_is_a_store_without_pages(make, monkeypatch, method):
  io = make()
  io.fill(tokens(2))

  def broken(*_):
    raise RuntimeError("broken")

  monkeypatch.setattr(io.store, method, broken)
  asked = look_up(tokens(2))
  found = io.do(asked)[0].pages
  assert found == (0 if method == "longest_prefix" else 2)
  read = PrefetchWork(work_id=1, look_up=asked, first_page=0, host_slots=slots(0, 1))
  assert io.do(read)[0].pages == (0 if method == "read" else 2)
  spill = SpillWork(
    work_id=2, parent_key=ROOT, token_ids=tokens(1), skip_pages=0, host_slots=slots(0)
  )
  assert io.do(spill, events=2)[1].ok == (method != "write")


def test_submitting_never_waits(make):
  io = make(Faults(delay_s=0.2))
  began_s = time.monotonic()
  for work_id in range(5):
    io.io.submit(look_up(tokens(1), work_id=work_id))
    io.io.submit(
      SpillWork(
        work_id=work_id, parent_key=ROOT, token_ids=tokens(1), skip_pages=0, host_slots=slots(0)
      )
    )
  io.io.flush()
  assert time.monotonic() - began_s < 0.1


def test_closing_ends_the_threads(make):
  io = make()
  io.do(look_up(tokens(1)))
  io.io.close()
  assert not [t for t in threading.enumerate() if t.name.startswith("storage-read")]


def test_pages_of_another_size_are_refused():
  pool = np.zeros((4, PAGE_BYTES * 2), np.uint8)
  with pytest.raises(ValueError, match="expected uint8"):
    StorageIo(
      MemoryStore(page_bytes=PAGE_BYTES), pool, page_size=4, now_s=time.monotonic, post=print
    )
