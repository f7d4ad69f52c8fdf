"""Tests of strata_jax.controller.tiers through the controller: loads, backups, the host tier."""

import numpy as np
import pytest

from strata_jax.radix_tree import DEVICE, HOST
from strata_jax.scheduler.views import Load, Prefill
from tests.controller_harness import Harness, tokens

PROMPT = tokens((0, 17))  # 4 pages of 4, and one token


def on_host_only(h: Harness, prompt: np.ndarray = PROMPT) -> None:
  """Serves a prompt, then pushes it out of the device pool."""
  h.run(prompt)
  evict(h)
  assert h.held(prompt) == (0, 16)


def evict(h: Harness) -> None:
  """Drops all that the device pool could drop."""
  tiers = h.controller.tiers
  for slots in tiers.tree.evict(DEVICE, 1000):
    tiers.device.free(slots)
  h.check()


def test_write_through_backs_up_what_was_computed():
  h = Harness()
  request = h.add(PROMPT, outputs=5)
  h.prefill(request)
  h.step_done()
  assert h.held(PROMPT) == (16, 0)
  h.view()
  applied = h.apply(decode=(request,))
  (backup,) = applied.work.backups  # rides in the next step
  assert backup.tokens == 16
  assert not backup.evicts
  assert h.held(PROMPT) == (16, 0)  # not before it is done
  h.backup_done()
  assert h.held(PROMPT) == (16, 16)
  for _ in range(3):
    h.step_done()
    h.view()
    applied = h.apply(decode=(request,))
    assert not applied.work.backups  # decoded pages are backed up together, at the end
  h.step_done()
  h.finish(request)
  (backup,) = h.flush().backups
  assert backup.tokens == 4
  h.backup_done()
  assert h.held(np.array(h.contexts[request], np.int32)) == (20, 20)
  assert h.flush() is None


def test_device_pages_under_backup_are_not_evicted():
  h = Harness(device_pages=8)
  h_first = h.add(PROMPT)
  h.prefill(h_first)
  h.step_done()
  h.finish(h_first)
  h.flush()
  assert h.free_pages()[0] == 4
  late = h.add(tokens((100, 24)))
  view = h.view()
  assert h.apply(prefill=(h.entry(view, late),)).stale == (late,)
  h.backup_done()
  h.prefill(late)
  h.step_done()
  h.finish(late)


def test_a_host_hit_is_loaded():
  h = Harness()
  on_host_only(h)
  request = h.add(PROMPT)
  assert h.path(request) == [("host", 16)]
  applied = h.prefill(request)
  (load,) = applied.work.loads
  assert load.tokens == 16
  assert applied.work.prefills[0].waits_for == (load.transfer_id,)
  assert h.hits(request) == (0, 16)
  assert h.admissions[request][0].load_tokens == 16
  assert h.controller.tree.pages[DEVICE].in_transfer == 4
  h.step_done()
  assert h.controller.tree.pages[DEVICE].in_transfer == 0
  assert h.computed[request] == [(16, 17)]
  h.finish(request)
  assert h.held(PROMPT) == (16, 16)  # the host copy stays


def test_a_load_of_the_first_pages_splits_the_node():
  h = Harness()
  on_host_only(h)
  request = h.add(PROMPT)
  (span,) = h.waiting(request).path
  h.view()
  h.apply(prefill=(Prefill(request, (Load(span.node_id, 8),), 8, 17),))
  h.step_done()
  assert h.computed[request] == [(8, 17)]
  assert h.hits(request) == (0, 8)
  h.finish(request)
  assert h.held(PROMPT) == (16, 16)


def test_a_host_hit_may_be_computed_again():
  h = Harness()
  on_host_only(h)
  request = h.add(PROMPT)
  view = h.view()
  h.apply(prefill=(h.entry(view, request, load=False),))
  h.step_done()
  assert h.computed[request] == [(0, 17)]
  h.finish(request)
  assert h.held(PROMPT) == (16, 16)
  assert h.controller.stats.backups == 1


def test_two_requests_share_one_load():
  h = Harness(device_pages=32)
  on_host_only(h)
  first, second = h.add(PROMPT), h.add(tokens((0, 17), (50, 3)))
  view = h.view()
  one = h.entry(view, first)
  two = h.entry(view, second)._replace(loads=())  # what the plan loads already
  applied = h.apply(prefill=(one, two))
  (load,) = applied.work.loads
  assert [p.waits_for for p in applied.work.prefills] == [(load.transfer_id,)] * 2
  third = h.add(PROMPT)
  assert h.path(third) == [("loading", 16)]
  view = h.view()
  assert view.loading == {view.waiting[0].path[0].node_id: 16}
  h.step_done()
  assert h.hits(second) == (0, 16)
  h.prefill(third)  # on the device by now
  assert not h.step.loads
  h.step_done()
  assert h.hits(third) == (16, 0)


def test_the_second_of_two_in_a_later_step_waits_for_the_same_load():
  h = Harness(device_pages=32)
  on_host_only(h)
  first, second = h.add(PROMPT), h.add(PROMPT)
  applied = h.prefill(first, park=(first,))
  (load,) = applied.work.loads
  assert applied.work.parked_loads == (load.transfer_id,)
  assert not applied.work.computes
  view = h.view()
  assert view.running[0].phase == "parked"
  assert view.parked == ((first,), 16, 1)
  applied = h.prefill(second)
  assert not applied.work.loads
  assert applied.work.prefills[0].waits_for == (load.transfer_id,)
  h.step_done()
  assert h.view().parked == ((first,), 0, 1)
  assert h.apply(resume=(first, 88)).stale == (88,)
  h.step_done()
  assert h.computed[first] == h.computed[second] == [(16, 17)]


def test_an_entry_whose_shared_load_was_dropped_is_stale():
  h = Harness(device_pages=8)
  on_host_only(h)
  big = h.add(tokens((0, 17), (70, 14)), outputs=1)
  small = h.add(PROMPT)
  blocker = h.add(tokens((200, 4)), outputs=1)
  h.prefill(blocker)
  h.step_done()
  view = h.view()
  entries = (h.entry(view, big), h.entry(view, small)._replace(loads=()))
  applied = h.apply(prefill=entries)
  assert applied.stale == (big, small)
  assert h.controller.tree.pages[HOST].protected == 0
  h.prefill(small)
  h.step_done()
  assert h.hits(small) == (0, 16)


def test_host_slots_stay_locked_until_the_load_has_read_them():
  h = Harness(device_pages=16, host_pages=4)
  on_host_only(h)
  request = h.add(PROMPT)
  h.prefill(request, park=(request,))
  h.run(tokens((100, 17)))  # wants all four host pages for its backup
  assert h.controller.stats.skipped_backups
  assert h.held(tokens((100, 17))) == (16, 0)
  h.view()
  h.apply(resume=(request,))
  h.step_done()  # the load reads the right bytes, late as it is
  h.finish(request)
  h.run(tokens((200, 9)))
  assert h.held(tokens((200, 9))) == (8, 8)


def test_a_backup_starts_after_the_compute_has_finished():
  h = Harness()
  request = h.add(PROMPT)
  h.prefill(request)
  assert h.flush() is None
  assert h.controller.tree.pages[HOST].held == 0
  h.step_done()
  assert h.flush() is not None


def test_pages_that_a_step_still_writes_go_to_nobody_else():
  h = Harness(device_pages=9)
  on_host_only(h)
  victim = h.add(tokens((100, 20)))
  h.prefill(victim)
  h.abort(victim)
  assert h.controller.tiers.device.free_pages == 4
  late = h.add(PROMPT)
  assert h.controller.tree.pages[DEVICE].evictable == 0
  h.step_done()
  assert h.held(tokens((100, 20)))[0] == 20  # its chunk was computed: it is kept
  h.prefill(late)
  h.step_done()
  assert h.hits(late) == (0, 16)


def test_ancestors_are_backed_up_first():
  h = Harness(write_policy="write_through_selective", device_pages=32)
  h.run(tokens((0, 9)))
  h.run(tokens((0, 17)))  # the first 8 tokens for the second time
  assert h.held(tokens((0, 17))) == (16, 8)
  h.run(tokens((0, 25)))
  assert h.held(tokens((0, 25))) == (24, 16)


@pytest.mark.parametrize("ok", [True, False])
def test_a_child_does_not_stand_on_host_without_its_parent(ok):
  """The backups of parent and child end in the wrong order; the parent's may fail."""
  h = Harness(device_pages=32, step_tokens=8)
  request = h.add(PROMPT)
  h.prefill(request, chunk=8)
  h.step_done()
  parent = h.flush().backups[0].transfer_id
  h.prefill(request)
  h.step_done()
  h.finish(request)
  child = h.flush().backups[0].transfer_id
  h.backup_done(child)
  assert h.held(PROMPT) == (16, 0)
  h.backup_done(parent, ok=ok)
  assert h.held(PROMPT) == (16, 16 if ok else 0)
  assert h.free_pages() == (32, 64)
  assert h.controller.stats.failed_backups == (not ok)


def test_a_parents_backup_fails_while_the_childs_runs():
  h = Harness(device_pages=32, step_tokens=8)
  request = h.add(PROMPT)
  h.prefill(request, chunk=8)
  h.step_done()
  parent = h.flush().backups[0].transfer_id
  h.prefill(request)
  h.step_done()
  child = h.flush().backups[0].transfer_id
  h.backup_done(parent, ok=False)
  h.finish(request)
  h.backup_done(child)
  assert h.held(PROMPT) == (16, 0)
  assert h.free_pages() == (32, 64)
  h.run(PROMPT)  # the next access backs all of it up
  assert h.held(PROMPT) == (16, 16)


def test_a_failed_backup_is_a_miss_later():
  h = Harness()
  request = h.add(PROMPT)
  h.prefill(request)
  h.step_done()
  h.finish(request)
  h.flush()
  h.backup_done(ok=False)
  evict(h)
  assert h.held(PROMPT) == (0, 0)
  assert not h.controller.tree.nodes


@pytest.mark.parametrize(("host_pages", "chunk", "kept"), [(3, 8, 8), (2, 12, 0)])
def test_a_backup_without_room_backs_up_the_beginning_only(host_pages, chunk, kept):
  """The end of the prompt stays away even where it would fit and what is before it does not."""
  h = Harness(host_pages=host_pages, step_tokens=12)
  request = h.add(PROMPT)
  h.prefill(request, chunk=chunk)
  h.step_done()
  h.prefill(request)
  h.step_done()
  h.finish(request)
  h.flush()
  h.transfers_done()
  assert h.held(PROMPT) == (16, kept)
  assert h.controller.stats.backed_up_tokens == kept
  assert h.controller.stats.skipped_backups > 0


def test_the_host_evicts_the_oldest_leaf():
  h = Harness(device_pages=64, host_pages=8)
  h.run(tokens((0, 17)))
  h.run(tokens((100, 17)))
  h.run(tokens((0, 17)))
  h.run(tokens((200, 9)))
  assert h.held(tokens((0, 17))) == (16, 16)
  assert h.held(tokens((100, 17))) == (16, 8)
  assert h.controller.stats.evicted_host_pages == 2


class TestSelective:
  def make(self, **fields) -> Harness:
    return Harness(write_policy="write_through_selective", **fields)

  def test_the_second_access_backs_up(self):
    h = self.make()
    h.run(PROMPT)
    assert h.held(PROMPT) == (16, 0)
    h.run(PROMPT)
    assert h.held(PROMPT) == (16, 16)

  def test_a_chunked_prompt_counts_once_and_is_backed_up_whole(self):
    h = self.make(step_tokens=4)
    for expected in (0, 16):
      request = h.add(PROMPT, outputs=2)
      while not any(r.phase == "decode" for r in h.view().running):
        h.prefill(request, chunk=4)
        h.step_done()
      h.view()
      h.apply(decode=(request,))
      h.step_done()
      h.finish(request)
      h.flush()
      h.transfers_done()
      assert h.held(PROMPT) == (16, expected)

  def test_a_node_that_was_dropped_counts_on(self):
    h = self.make()
    h.run(PROMPT)
    evict(h)
    assert not h.controller.tree.nodes
    h.run(PROMPT)
    assert h.held(PROMPT) == (16, 16)

  def test_only_what_was_dropped_counts_on(self):
    h = self.make(page_size=1, device_pages=64)
    h.run(tokens((0, 9)))
    evict(h)
    h.run(tokens((0, 6), (50, 9)))
    assert h.held(tokens((0, 6), (50, 9))) == (15, 6)

  def test_preemption_counts_once(self):
    h = self.make()
    request = h.add(PROMPT, outputs=4)
    for _ in range(2):
      h.prefill(request)
      h.step_done()
      h.view()
      h.apply(preempt=(request,))
      evict(h)
    h.prefill(request)
    h.step_done()
    h.finish(request)
    h.flush()
    h.transfers_done()
    assert h.held(PROMPT) == (16, 0)
    h.run(PROMPT)
    assert h.held(PROMPT) == (16, 16)


class TestWriteBack:
  def make(self, **fields) -> Harness:
    return Harness(write_policy="write_back", **fields)

  def test_a_chain_of_three_goes_to_host(self):
    h = self.make(device_pages=7)
    for end in (9, 17, 25):
      h.run(tokens((0, end)))
    assert h.held(tokens((0, 25))) == (24, 0)
    assert len(h.controller.tree.match(tokens((0, 25))).nodes) == 3
    late = h.add(tokens((100, 28)))
    applied = h.prefill(late)
    (backup,) = applied.work.backups
    assert backup.evicts
    assert backup.tokens == 24
    assert h.held(tokens((0, 25))) == (0, 0)  # under way
    h.step_done()  # the step writes the pages that the backup has read at its start
    h.backup_done()
    assert h.held(tokens((0, 25))) == (0, 24)
    h.finish(late)
    again = h.run(tokens((0, 25)))
    assert h.hits(again) == (0, 24)

  def test_ancestors_go_with_a_leaf(self):
    h = self.make(device_pages=6)
    h.run(tokens((0, 9)))
    h.run(tokens((0, 17)))
    h.run(tokens((100, 12)))  # evicts one page of the leaf
    assert h.held(tokens((0, 17))) == (12, 16)
    assert h.controller.stats.dropped_pages == 0

  def test_room_on_the_host_is_made_from_the_copy_of_the_own_hit(self):
    """Which splits the hit's node while the pages of its request are taken."""
    h = self.make(device_pages=8, host_pages=4)
    h.run(PROMPT)
    h.run(tokens((100, 32)))  # PROMPT goes to the host, which is full now
    assert h.held(PROMPT) == (0, 16)
    evict(h)
    h.run(PROMPT)  # loaded: its copy stays
    h.run(tokens((200, 8)))
    assert h.held(PROMPT) == (16, 16)
    late = h.add(tokens((0, 16), (300, 12)))  # 3 pages of its own, 2 are free
    h.prefill(late)
    assert h.held(PROMPT) == (16, 8)
    h.step_done()
    assert h.hits(late) == (16, 0)
    assert h.controller.stats.evicted_host_pages == 2
    h.finish(late)
    h.transfers_done()
    assert h.held(tokens((200, 8))) == (4, 8)

  def test_pages_under_way_are_not_loaded(self):
    h = self.make(device_pages=8)
    h.run(PROMPT)
    blocker = h.add(tokens((100, 32)))
    h.prefill(blocker)
    waiting = h.add(PROMPT)
    assert h.path(waiting) == [("in_queue", 16)]
    h.backup_done()
    assert h.path(waiting) == [("host", 16)]
    h.step_done()
    h.finish(blocker)

  def test_without_host_room_pages_are_dropped(self):
    h = self.make(device_pages=8, host_pages=2)
    h.run(PROMPT)
    h.run(tokens((100, 32)))
    assert h.held(PROMPT) == (0, 0)
    assert h.controller.stats.dropped_pages == 4
    assert h.controller.stats.skipped_backups == 1

  def test_of_two_that_are_evicted_at_once_the_second_may_find_no_room(self):
    h = self.make(device_pages=8, host_pages=4)
    h.run(tokens((0, 13)))
    h.run(tokens((50, 13)))
    blocker = h.add(tokens((100, 32)))
    (backup,) = h.prefill(blocker).work.backups
    assert backup.tokens == 12
    h.backup_done()
    assert h.held(tokens((0, 13))) == (0, 12)
    assert h.held(tokens((50, 13))) == (0, 0)
    h.step_done()
    assert h.controller.stats.dropped_pages == 3

  def test_a_failed_write_back_drops_the_pages(self):
    h = self.make(device_pages=8)
    h.run(PROMPT)
    blocker = h.add(tokens((100, 32)))
    h.prefill(blocker)
    h.backup_done(ok=False)
    assert h.held(PROMPT) == (0, 0)
    assert h.controller.stats.dropped_pages == 4
    assert h.free_pages()[1] == 64
    h.step_done()

  def test_pages_computed_again_while_they_are_written_back(self):
    h = self.make(device_pages=8)
    h.run(tokens((0, 13)))
    blocker = h.add(tokens((100, 32)))
    h.prefill(blocker)
    h.step_done()
    h.finish(blocker)
    again = h.add(tokens((0, 13)))
    h.prefill(again)
    h.step_done()
    h.backup_done()
    assert h.computed[again] == [(0, 13)]
    assert h.held(tokens((0, 13))) == (12, 12)
    h.finish(again)


def test_no_host_tier():
  h = Harness(host_pages=0, device_pages=8)
  h.run(PROMPT)
  assert h.flush() is None
  h.run(tokens((100, 32)))
  assert h.held(PROMPT) == (0, 0)


def test_policy_none_backs_nothing_up():
  h = Harness(write_policy="none")
  h.run(PROMPT)
  h.run(PROMPT)
  assert h.held(PROMPT) == (16, 0)
