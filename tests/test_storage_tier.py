"""The storage tier in the controller: look-ups, prefetch, spill; cases 33 and 37 to 40."""

import numpy as np
import pytest

from strata_jax.config import StorageConfig
from strata_jax.executors.protocol import LookUpDone
from tests.controller_harness import tokens
from tests.storage_harness import StorageHarness

PAGE = 4


def prompt(pages: int, first: int = 100) -> np.ndarray:
  """Whole pages and one token more, which is computed in any case."""
  return tokens((first, pages * PAGE + 1))


def filled(pages: int, first: int = 100, **options) -> dict:
  """A store that a process filled with the pages of a prompt."""
  harness = StorageHarness(**options)
  harness.run(prompt(pages, first))
  return harness.store


# Spill.


def test_write_through_spills_what_came_to_the_host():
  harness = StorageHarness()
  harness.run(prompt(5))
  assert len(harness.store) == 5
  assert harness.stored(prompt(5)) == 20
  stats = harness.controller.stats
  assert stats.spilled_pages == stats.handed_over_pages == stats.durable_pages == 5


def test_a_backup_says_how_far_it_got():
  harness = StorageHarness()
  request_id = harness.add(prompt(5))
  harness.settle()
  harness.prefill(request_id)
  harness.step_done()
  harness.finish(request_id)
  ask = lambda: tuple(harness.controller.backup_progress(prompt(5)))
  assert ask() == (20, 0, 0, 0)
  assert tuple(harness.controller.backup_progress(prompt(3)[:-1])) == (12, 0, 0, 0)
  harness.flush()
  harness.transfers_done()
  assert ask() == (0, 20, 0, 0)
  harness.start()
  assert ask() == (0, 20, 0, 0)
  harness.spill_handed()
  assert ask() == (0, 0, 20, 0)
  harness.spill_done()
  assert ask() == (0, 0, 0, 20)


def test_slots_are_locked_until_the_store_has_its_copy():
  harness = StorageHarness(host_pages=6)
  request_id = harness.add(prompt(5))
  harness.prefill(request_id)
  harness.step_done()
  harness.finish(request_id)
  harness.flush()
  harness.transfers_done()
  harness.start()
  assert harness.free_pages()[1] == 1
  harness.spill_handed()
  assert harness.free_pages()[1] == 6
  harness.spill_done()


def test_selective_spills_the_second_time():
  harness = StorageHarness(write_policy="write_through_selective")
  harness.run(prompt(5))
  assert not harness.store
  harness.run(prompt(5))
  assert len(harness.store) == 5


def test_ancestors_are_spilled_first_and_a_refused_write_leaves_no_hole():
  harness = StorageHarness(storage={"spill_tokens_in_flight": 2 * PAGE, "retry_s": 0.0})
  for pages in (2, 4, 6):
    request_id = harness.add(prompt(pages))
    harness.look_ups.clear()
    harness.prefill(request_id)
    harness.step_done()
    harness.finish(request_id)
    harness.flush()
    harness.transfers_done()
  harness.start()
  assert len(harness.spills) == 1
  harness.spill_handed()
  harness.start()
  second = harness.spill_handed()
  harness.start()
  third = harness.spill_handed()
  harness.spill_done(third)
  assert harness.stored(prompt(6)) == 0
  harness.spill_done(second, ok=False)
  harness.spill_done()
  assert harness.stored(prompt(6)) == 8
  assert harness.controller.stats.failed_spills == 1


def test_after_a_refused_write_nothing_is_written_for_a_while():
  harness = StorageHarness(storage={"retry_s": 30.0})
  harness.now_s = 100.0
  request_id = harness.add(prompt(2))
  harness.prefill(request_id)
  harness.step_done()
  harness.finish(request_id)
  harness.flush()
  harness.transfers_done()
  harness.start()
  harness.spill_handed()
  harness.spill_done(ok=False)
  assert harness.stored(prompt(2)) == 0
  assert tuple(harness.controller.backup_progress(prompt(2))) == (0, 8, 0, 0)
  harness.run(prompt(3, first=500))
  assert not harness.store
  assert harness.controller.stats.skipped_spills == 1
  harness.now_s = 131.0
  harness.run(prompt(3, first=900))
  assert len(harness.store) == 3


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_a_store_that_is_only_read(write_policy):
  store = filled(5)
  harness = StorageHarness(
    store=store, device_pages=6, host_pages=8, write_policy=write_policy,
    storage={"writes": False, "held_host_fraction": 1.0},
  )  # fmt: skip
  harness.run(prompt(5))
  for first in (700, 800, 900):  # push each other out of both tiers
    harness.run(prompt(5, first=first))
  assert len(store) == 5
  assert harness.controller.stats.prefetched_tokens == 20


def test_write_back_spills_at_eviction_from_the_host():
  harness = StorageHarness(device_pages=6, host_pages=12, write_policy="write_back")
  prompts = [prompt(5, first=100 * i) for i in range(1, 8)]
  for each in prompts:
    harness.run(each)
  assert harness.controller.stats.spilled_pages > 0
  later = StorageHarness(store=harness.store)
  stored = []
  for each in prompts:
    later.add(each)
    later.start()
    later.look_up_done()
    stored.append(later.controller.stats.found_tokens)
  assert stored[0] == 20  # the first to be evicted


def test_write_back_to_a_store_that_refuses_still_evicts():
  harness = StorageHarness(
    device_pages=6, host_pages=8, write_policy="write_back", storage={"retry_s": 1e9}
  )
  for i in range(1, 12):
    request_id = harness.add(prompt(5, first=100 * i))
    harness.look_ups.clear()
    harness.prefill(request_id)
    harness.step_done()
    harness.finish(request_id)
    harness.flush()
    harness.transfers_done()
    harness.start()
    while harness.spills:
      harness.spill_handed()
    while harness.handed:
      harness.spill_done(ok=False)
  assert harness.controller.stats.failed_spills >= 1
  assert harness.controller.stats.evicted_host_pages > 0
  assert not harness.store


# Prefetch.


def test_a_prefix_that_no_memory_has_is_found_in_storage():
  """Case 39, in a new process."""
  harness = StorageHarness(store=filled(5))
  request_id = harness.add(prompt(5))
  assert harness.path(request_id) == [("in_queue", 20)]
  harness.start()
  harness.look_up_done()
  assert harness.path(request_id) == [("storage", 20)]
  harness.start()
  assert harness.path(request_id) == [("prefetching", 16), ("prefetching", 4)]
  harness.read_done()
  assert harness.path(request_id) == [("host", 16), ("prefetching", 4)]
  assert harness.prefetch(request_id)[:2] == (16, 20)
  harness.read_done()
  assert harness.prefetch(request_id)[:2] == (20, 20)
  harness.prefill(request_id)
  harness.step_done()
  assert harness.all_hits(request_id) == (0, 0, 20)
  assert harness.computed[request_id] == [(20, 21)]


def test_a_prefix_dropped_from_device_and_host_is_found_again():
  """Case 39, in the same process."""
  harness = StorageHarness(device_pages=6, host_pages=5, storage={"held_host_fraction": 1.0})
  harness.run(prompt(5))
  harness.run(prompt(5, first=500))
  assert harness.held(prompt(5)) == (0, 0)
  request_id = harness.run(prompt(5))
  assert harness.all_hits(request_id) == (0, 0, 20)


def test_one_match_takes_from_device_host_and_storage():
  """Pages on the device only, on the host only, and in storage only, in one prompt."""
  store = filled(9)
  harness = StorageHarness(store=store, device_pages=16, storage={"writes": False})
  first = harness.add(prompt(2))  # pages 0-1 to device and host, computed
  harness.look_ups.clear()
  harness.prefill(first)
  harness.step_done()
  harness.finish(first)
  second = harness.add(prompt(5))  # pages 2-4, too
  harness.look_ups.clear()
  harness.prefill(second)
  harness.step_done()
  harness.finish(second)
  harness.flush()
  harness.transfers_done()
  tiers = harness.controller.tiers
  node = tiers.tree.victim(0, 3)  # the last three leave the device
  tiers.device.free(tiers.tree.detach(node, 0))
  tiers.tree.prune(node)
  harness.check()
  third = harness.add(prompt(9))
  harness.settle()
  assert [state for state, _ in harness.path(third)][:2] == ["device", "host"]
  harness.prefill(third)
  harness.step_done()
  assert harness.all_hits(third) == (8, 12, 16)
  assert harness.computed[third] == [(36, 37)]


def test_short_runs_are_not_worth_a_look():
  store = filled(5)
  harness = StorageHarness(store=store, storage={"min_prefetch_tokens": 24})
  request_id = harness.add(prompt(5))
  harness.start()
  assert not harness.look_ups
  assert harness.prefetch(request_id) is None
  longer = harness.add(prompt(8))
  harness.start()
  harness.look_up_done()  # finds five pages of eight: too few
  assert harness.prefetch(longer) is None
  harness.start()
  assert not harness.reads


def test_another_fingerprint_never_hits():
  """Case 33."""
  store = filled(5)
  for changes in ({"fingerprint": "other"}, {"page_size": 2}):
    harness = StorageHarness(store=store, **changes)
    harness.add(prompt(5))
    harness.settle()
    assert harness.controller.stats.found_tokens == 0


@pytest.mark.parametrize("namespace", [{"salt": "tenant"}, {"adapter": "lora"}])
def test_salt_and_adapter_are_part_of_the_key(namespace):
  """Case 33."""
  harness = StorageHarness(store=filled(5))
  harness.add(prompt(5), **namespace)
  harness.settle()
  assert harness.controller.stats.found_tokens == 0


def test_a_hole_ends_the_hit():
  """Case 40: page 2 of 3 is gone, the hit is one page."""
  store = filled(3)
  del store[list(store)[1]]
  harness = StorageHarness(store=store)
  request_id = harness.add(prompt(3))
  harness.start()
  harness.look_up_done()
  assert harness.path(request_id) == [("storage", PAGE), ("in_queue", 2 * PAGE)]
  harness.settle()
  assert harness.prefetch(request_id)[:2] == (PAGE, PAGE)
  harness.prefill(request_id)
  assert harness.all_hits(request_id) == (0, 0, PAGE)


def test_a_page_lost_between_look_up_and_read_ends_the_hit():
  store = filled(8)
  harness = StorageHarness(store=store)
  request_id = harness.add(prompt(8))
  harness.start()
  harness.look_up_done()
  harness.start()
  del store[list(store)[2]]
  harness.settle()
  assert harness.prefetch(request_id)[:2] == (8, 8)
  harness.prefill(request_id)
  harness.step_done()
  assert harness.all_hits(request_id) == (0, 0, 8)
  assert harness.controller.stats.lost_prefetch_tokens >= 8
  harness.finish(request_id)
  harness.flush()
  harness.transfers_done()
  harness.settle()
  assert len(store) == 8  # written again
  assert harness.stored(prompt(8)) == 32


def test_what_is_computed_by_another_is_not_read():
  store = filled(5)
  harness = StorageHarness(store=store)
  first = harness.add(prompt(5))
  harness.prefill(first)  # at once, without waiting for storage
  second = harness.add(prompt(5))
  harness.start()
  assert all(work.request_id == first for work in harness.look_ups.values())
  harness.step_done()
  harness.settle()
  assert harness.path(second) == [("device", 20)]
  assert not harness.reads


def test_two_requests_share_what_is_read():
  harness = StorageHarness(store=filled(5))
  first, second = harness.add(prompt(5)), harness.add(prompt(5))
  harness.start()
  harness.look_up_done()
  harness.look_up_done()
  harness.start()
  assert sum(len(work.host_slots) for work in harness.reads.values()) == 5
  harness.read_done()
  assert harness.prefetch(first) == harness.prefetch(second)
  harness.abort(first)
  harness.settle()
  assert harness.path(second) == [("host", 16), ("host", 4)]
  harness.prefill(second)
  assert harness.all_hits(second) == (0, 0, 20)


def test_best_effort_uses_what_came_and_computes_the_rest():
  """Case 38, first part: reads under way when it is admitted are not waited for."""
  harness = StorageHarness(store=filled(8), storage={"prefetch_tokens_in_flight": 4 * PAGE})
  request_id = harness.add(prompt(8))
  harness.start()
  harness.look_up_done()
  harness.start()
  harness.read_done()
  harness.start()
  assert len(harness.reads) == 1
  harness.prefill(request_id)
  assert harness.all_hits(request_id) == (0, 0, 16)
  harness.step_done()
  assert harness.computed[request_id] == [(16, 33)]
  assert harness.controller.stats.cut_prefetches == 1
  harness.settle()  # the late read is kept: the pages are in use on the device
  assert harness.held(prompt(8)) == (32, 32)


def test_a_chunked_prompt_uses_pages_that_come_while_it_runs():
  harness = StorageHarness(store=filled(8), storage={"read_tokens": 8 * PAGE})
  request_id = harness.add(prompt(8))
  harness.start()
  harness.look_up_done()
  harness.start()
  harness.prefill(request_id, chunk=4)
  harness.read_done()
  harness.step_done()
  harness.prefill(request_id)  # now the rest is on the host
  harness.step_done()
  assert harness.computed[request_id] == [(0, 4), (32, 33)]


# Case 37.


@pytest.mark.parametrize("stage", ["asked", "looked up", "read", "some came", "all came"])
def test_an_abort_frees_the_host_slots_in_every_stage(stage):
  harness = StorageHarness(store=filled(8), host_pages=20)
  start = harness.controller.tiers.host.free_pages
  request_id = harness.add(prompt(8))
  harness.start()
  if stage != "asked":
    harness.look_up_done()
  if stage in ("read", "some came", "all came"):
    harness.start()
  if stage in ("some came", "all came"):
    harness.read_done()
  if stage == "all came":
    harness.start()
    harness.read_done()
  harness.abort(request_id)
  harness.settle()
  tiers = harness.controller.tiers
  pages = tiers.tree.pages[1]
  assert pages.in_transfer == pages.protected == 0
  assert tiers.host.free_pages + pages.evictable == start
  assert not tiers.transfers
  assert not harness.controller.storage.is_busy


def test_too_little_host_memory_shortens_a_prefetch():
  harness = StorageHarness(store=filled(8), host_pages=6, storage={"held_host_fraction": 1.0})
  request_id = harness.add(prompt(8))
  harness.settle()
  assert harness.prefetch(request_id)[:2] == (24, 24)
  harness.prefill(request_id)
  harness.step_done()
  assert harness.all_hits(request_id) == (0, 0, 24)
  assert harness.controller.stats.shortened_prefetches >= 1


def test_a_prefetch_takes_the_host_pages_that_others_leave_it():
  """A parked load keeps three of the six pages; a read would be of four."""
  harness = StorageHarness(
    store=filled(8), host_pages=6, storage={"held_host_fraction": 1.0, "writes": False}
  )
  harness.run(prompt(3, first=500))
  tiers = harness.controller.tiers
  tiers.device.free(np.concatenate(list(tiers.tree.evict(0, 99))))
  loads = harness.add(prompt(3, first=500))
  harness.prefill(loads, park=(loads,))
  waits = harness.add(prompt(8))
  harness.settle()
  assert harness.prefetch(waits)[:2] == (12, 12)
  harness.prefill(waits, resume=(loads,))
  assert harness.all_hits(waits) == (0, 0, 12)
  harness.step_done()


def test_only_a_part_of_the_host_is_held_and_others_wait_for_it():
  store = filled(6) | filled(6, first=500)
  harness = StorageHarness(store=store, host_pages=16, storage={"held_host_fraction": 0.5})
  first, second = harness.add(prompt(6)), harness.add(prompt(6, first=500))
  harness.settle()
  assert harness.prefetch(first)[:2] == (24, 24)
  assert harness.prefetch(second)[:2] == (8, 24)  # two pages of eight
  harness.prefill(first)
  harness.step_done()
  harness.settle()
  assert harness.prefetch(second)[:2] == (24, 24)


def test_what_came_for_who_waits_is_not_evicted():
  harness = StorageHarness(store=filled(5), host_pages=10, device_pages=12)
  waits = harness.add(prompt(5))
  harness.settle()
  for i in range(3):  # others want the host's room
    request_id = harness.add(prompt(4, first=1000 * (i + 1)))
    harness.look_ups.clear()
    harness.prefill(request_id)
    harness.step_done()
    harness.finish(request_id)
    harness.flush()
    harness.transfers_done()
    harness.settle()
  assert harness.prefetch(waits)[:2] == (20, 20)
  harness.prefill(waits)
  assert harness.all_hits(waits) == (0, 0, 20)


def test_reads_that_come_in_another_order_are_kept():
  """The second piece comes first, and others want its room before the first one is there."""
  harness = StorageHarness(
    store=filled(8), host_pages=9, device_pages=12, storage={"held_host_fraction": 1.0}
  )
  waits = harness.add(prompt(8))
  harness.start()
  harness.look_up_done()
  harness.start()
  first, second = harness.reads
  harness.read_done(second)
  other = harness.add(prompt(4, first=1000))
  harness.look_ups.clear()
  harness.prefill(other)
  harness.step_done()
  harness.finish(other)
  harness.flush()
  harness.transfers_done()
  harness.read_done(first)
  assert harness.prefetch(waits)[:2] == (32, 32)


def waiting_behind_a_backup() -> tuple[StorageHarness, int]:
  """Who shares three pages that are under way from the device to the host; all are stored."""
  harness = StorageHarness(store=filled(8), device_pages=9, storage={"writes": False})
  first = harness.add(prompt(3))
  harness.prefill(first)
  harness.step_done()
  harness.finish(first)
  harness.flush()
  waits = harness.add(prompt(8))
  harness.start()
  return harness, waits


def test_a_prefetch_that_counted_on_a_backup_reads_what_it_lost():
  harness, waits = waiting_behind_a_backup()
  harness.look_ups.pop(0)  # nobody waits for that of the first one
  harness.look_up_done()
  harness.start()
  harness.backup_done(ok=False)
  tiers = harness.controller.tiers
  tiers.device.free(tiers.allocate(9))  # evicts the pages from the device
  harness.settle()
  assert harness.prefetch(waits)[0] == harness.prefetch(waits)[1]
  harness.prefill(waits)
  harness.step_done()
  assert harness.computed[waits][-1][1] == 33


def test_what_is_read_before_the_backup_above_it_ends_is_seen_as_it_is():
  harness, waits = waiting_behind_a_backup()
  while harness.look_ups:
    harness.look_up_done()
  harness.start()
  states = lambda: [state for state, _ in harness.path(waits)]
  assert states() == ["device", "prefetching", "prefetching"]
  harness.read_done()
  assert states() == ["device", "storage", "prefetching"]  # on the host once all above is there
  harness.settle()
  harness.backup_done()
  assert states()[-1] == "host"
  assert harness.prefetch(waits)[0] == harness.prefetch(waits)[1]


def test_bytes_in_flight_are_bounded():
  store: dict = {}
  for first in range(100, 900, 100):
    store |= filled(6, first=first)
  harness = StorageHarness(
    store=store, host_pages=200, storage={"prefetch_tokens_in_flight": 10 * PAGE}
  )
  for first in range(100, 900, 100):
    harness.add(prompt(6, first=first))
  harness.start()
  while harness.look_ups:
    harness.look_up_done()
  for _ in range(100):
    harness.start()
    assert sum(len(work.host_slots) for work in harness.reads.values()) <= 10
    if not harness.reads:
      break
    harness.read_done(list(harness.reads)[-1])
  assert harness.controller.stats.prefetched_tokens == 8 * 24


@pytest.mark.parametrize("seed", range(4))
def test_250_aborts_at_random_moments_leave_nothing(seed):
  """Case 37, a thousand aborts in all: every tier's free count returns to its start."""
  rng = np.random.default_rng(seed)
  store: dict = {}
  for first in range(100, 700, 100):
    store |= filled(8, first=first)
  harness = StorageHarness(
    store=store, device_pages=40, host_pages=30, checks=False,
    write_policy=("write_through", "write_back")[seed % 2],
  )  # fmt: skip
  start = harness.free_pages()
  alive: list[int] = []
  aborted = 0
  running: set[int] = set()
  while aborted < 250:
    action = rng.integers(8)
    if action <= 1 and len(alive) < 12:
      pages, first = int(rng.integers(1, 9)), 100 * int(rng.integers(1, 7))
      alive.append(harness.add(prompt(pages, first=first)))
    elif action == 2:
      harness.start()
    elif action == 3 and harness.look_ups:
      harness.look_up_done(int(rng.choice(list(harness.look_ups))))
    elif action == 4 and harness.reads:
      lost = int(rng.integers(3)) if rng.random() < 0.2 else None
      harness.read_done(int(rng.choice(list(harness.reads))), pages=lost)
    elif action == 5 and harness.spills:
      harness.spill_handed(int(rng.choice(list(harness.spills))))
    elif action == 6 and harness.handed:
      harness.spill_done(int(rng.choice(list(harness.handed))), ok=bool(rng.random() < 0.8))
    elif action == 7 and alive:
      if harness.step is None and rng.random() < 0.5:
        waiting = [request_id for request_id in alive if request_id not in running]
        if waiting:
          applied = harness.prefill(waiting[0])
          running.update(admission.request_id for admission in applied.admitted)
      else:
        victim = alive.pop(int(rng.integers(len(alive))))
        running.discard(victim)
        harness.abort(victim)
        aborted += 1
    if harness.step is not None and rng.random() < 0.5:
      harness.step_done()
    if rng.random() < 0.2:
      harness.transfers_done()
    if rng.random() < 0.05:
      harness.controller.check()
  for request_id in alive:
    harness.abort(request_id)
  if harness.step is not None:
    harness.step_done()
  harness.transfers_done()
  while harness.flush() is not None:
    harness.transfers_done()
  harness.settle()
  harness.controller.check()
  assert harness.free_pages() == start
  assert not harness.controller.tiers.transfers
  assert not harness.controller.storage.is_busy
  harness.controller.reset()
  tiers = harness.controller.tiers
  assert (tiers.device.free_pages, tiers.host.free_pages) == start


# Scheduling.


def test_the_deadline_grows_with_what_is_missing():
  harness = StorageHarness(
    store=filled(5),
    storage={"prefetch_base_s": 2.0, "prefetch_s_per_1024_tokens": 51.2, "prefetch_limit_s": 2.5},
  )
  harness.now_s = 7.0
  short, long = harness.add(prompt(5)), harness.add(prompt(12, first=900))
  assert harness.prefetch(short) == (0, 20, pytest.approx(2.0 + 1.0, abs=0.6))
  assert harness.prefetch(short).deadline_s == pytest.approx(2.5)
  assert harness.prefetch(long).deadline_s == pytest.approx(2.5)


def test_a_plan_may_cancel_a_prefetch_without_admitting():
  harness = StorageHarness(store=filled(8), storage={"prefetch_tokens_in_flight": 4 * PAGE})
  request_id = harness.add(prompt(8))
  harness.start()
  harness.look_up_done()
  harness.start()
  harness.view()
  harness.apply(cancel_prefetch=(request_id,))
  assert harness.prefetch(request_id) is None
  harness.settle()
  assert harness.path(request_id) == [("host", 16), ("storage", 16)]
  harness.settle()
  assert harness.controller.stats.prefetches == 1


def test_what_goes_to_storage_while_a_request_waits_is_read_for_it():
  """It came when nobody had its prompt; another computed it, and memory lost it again."""
  harness = StorageHarness(device_pages=8, host_pages=6, storage={"held_host_fraction": 1.0})
  waits = harness.add(prompt(5))
  harness.settle()
  assert harness.prefetch(waits) is None
  harness.run(prompt(5))
  harness.run(prompt(5, first=500))  # takes its room in both
  assert harness.prefetch(waits) is not None
  harness.settle()
  assert harness.prefetch(waits)[:2] == (16, 16)  # less what was still there
  harness.prefill(waits)
  harness.step_done()
  assert sum(harness.all_hits(waits)) == 20


def test_a_look_up_that_finds_less_than_was_written_ends_there():
  """The store evicted pages that the tree believes in: no look-up follows another for ever."""
  harness = StorageHarness(device_pages=8, host_pages=6)
  waits = harness.add(prompt(5))
  harness.settle()
  harness.run(prompt(5))
  harness.store.clear()
  harness.run(prompt(5, first=500))
  for _ in range(5):
    harness.view()
    harness.settle()
  assert harness.prefetch(waits) is None
  assert harness.controller.stats.look_ups <= 5


def test_a_preempted_request_is_looked_up_again():
  harness = StorageHarness(store=filled(5), device_pages=8, host_pages=8)
  request_id = harness.add(prompt(5), outputs=3)
  harness.settle()
  harness.prefill(request_id)
  harness.step_done()
  harness.view()
  harness.apply(preempt=(request_id,))
  harness.settle()
  assert harness.path(request_id)[0][0] in ("device", "host")
  harness.prefill(request_id)
  harness.step_done()
  assert harness.admissions[request_id][1].readmitted


def test_events_of_a_storage_tier_that_is_not_there_are_refused():
  harness = StorageHarness(host_pages=0)
  assert harness.controller.storage is None
  assert harness.controller.storage_work(0.0) == ()
  with pytest.raises(ValueError, match="no event of a storage tier"):
    harness.controller.complete(LookUpDone(0, 0.0, 0), 0.0)


@pytest.mark.parametrize(
  "wrong",
  [{"min_prefetch_tokens": 0}, {"read_tokens": 0}, {"retry_s": -1}, {"held_host_fraction": 1.5}],
)
def test_impossible_configs_are_refused(wrong):
  with pytest.raises(ValueError, match="expected"):
    StorageConfig(**wrong)
