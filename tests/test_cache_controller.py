"""Tests of strata_jax.cache_controller: requests from arrival to end, on the device tier."""

import copy

import numpy as np
import pytest

from strata_jax.executors.protocol import LoadDone, StepDone
from strata_jax.scheduler.views import Deferred, Prefill, Refused, StepPlan
from tests.controller_harness import Harness, tokens


def test_a_wholly_cached_prompt_still_computes_one_token():
  h = Harness(page_size=16, device_pages=40)
  prompt = tokens((0, 48))
  runs = [h.run(prompt) for _ in range(3)]
  assert [h.hits(run)[0] for run in runs] == [0, 32, 32]
  longer = h.run(tokens((0, 64)))
  assert h.hits(longer) == (48, 0)
  assert h.computed[longer] == [(48, 64)]


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_decode_publishes_full_pages(page_size):
  h = Harness(page_size=page_size, device_pages=80, host_pages=0)
  prompt = tokens((0, 9))
  request = h.add(prompt, outputs=8)
  h.prefill(request)
  h.step_done()
  for step in range(7):
    h.view()
    context = np.array(h.contexts[request][:-1], np.int32)
    assert len(context) == 9 + step
    assert h.held(context)[0] == len(context) // page_size * page_size  # while it runs, too
    h.apply(decode=(request,))
    h.step_done()
  h.finish(request)
  context = np.array(h.contexts[request], np.int32)
  assert h.held(context)[0] == 16 // page_size * page_size  # the last token has no KV
  assert len(h.controller.tree.nodes) <= 3  # decoded pages went to one node


def test_finish_keeps_at_most_the_outputs_that_count():
  h = Harness(page_size=1, decode_steps=8)
  request = h.add(tokens((0, 4)), outputs=9)
  h.prefill(request)
  h.step_done()
  h.view()
  h.apply(decode=(request,), decode_steps=8)
  h.step_done()
  h.finish(request, output_tokens=3)
  assert h.held(np.array(h.contexts[request], np.int32))[0] == 7


def test_decode_in_several_steps_at_once_equals_single_steps():
  contexts, totals = [], []
  for steps in (1, 4):
    h = Harness(page_size=2, decode_steps=4)
    request = h.add(tokens((0, 5)), outputs=9)
    h.prefill(request)
    h.step_done()
    for _ in range(8 // steps):
      h.view()
      h.apply(decode=(request,), decode_steps=steps)
      h.step_done()
    h.view()
    contexts.append(h.contexts[request])
    totals.append(h.held(np.array(h.contexts[request], np.int32)))
    h.finish(request)
  assert contexts[0] == contexts[1]
  assert totals[0] == totals[1] == (12, 0)


def test_refusals_say_why_and_change_nothing():
  h = Harness(page_size=4, device_pages=4, context_tokens=14)
  assert h.try_add(tokens((0, 0))) == "empty prompt"
  assert "exceed the context of 14 tokens" in (h.try_add(tokens((0, 13)), outputs=2) or "")
  h.controller.context_tokens = None
  assert "need 5 pages, the device pool has 4" in (h.try_add(tokens((0, 17))) or "")
  assert h.try_add(tokens((0, 16))) is None  # the last output needs no page
  assert [r.request_id for r in h.view().waiting] == [0]
  h._next_id = 0
  with pytest.raises(ValueError, match="new request id, got 0"):
    h.try_add(tokens((0, 3)))


def test_steps_have_room_for_a_page():
  Harness(page_size=16, step_tokens=16)
  with pytest.raises(
    ValueError, match=r"step_tokens: expected at least a page of 16 tokens, got 8"
  ):
    Harness(page_size=16, step_tokens=8)


def test_a_refused_request_leaves():
  h = Harness()
  request = h.add(tokens((0, 9)))
  h.view()
  applied = h.apply(refused=(Refused(request, "never"), Refused(77, "unknown")))
  assert applied.refused == (Refused(request, "never"),)
  assert applied.stale == (77,)
  assert not h.controller.tree.nodes


def test_reset_with_users_fails_and_changes_nothing():
  h = Harness()
  h.run(tokens((0, 9)))
  request = h.add(tokens((0, 9)))
  with pytest.raises(RuntimeError, match="1 requests"):
    h.controller.reset()
  assert h.held(tokens((0, 9))) == (8, 8)
  h.prefill(request)
  with pytest.raises(RuntimeError, match="nothing in use"):
    h.controller.reset()
  h.step_done()
  h.finish(request)
  h.controller.reset()
  h.check()
  assert h.held(tokens((0, 9))) == (0, 0)
  assert h.free_pages() == (16, 64)
  again = h.run(tokens((0, 9)))
  assert h.hits(again) == (0, 0)


def test_reset_waits_for_transfers_and_leaves_nothing_to_evict():
  h = Harness(device_pages=4)
  request = h.add(tokens((0, 13)))
  h.prefill(request)
  h.step_done()
  h.finish(request)
  h.flush()
  with pytest.raises(RuntimeError, match="0 requests and 1 transfers"):
    h.controller.reset()
  h.transfers_done()
  assert h.held(tokens((0, 13))) == (12, 12)
  seen = set(h.controller.tree.nodes)
  h.controller.reset()
  h.run(tokens((100, 13)))
  assert not seen & h.controller.tree.nodes.keys()
  h.run(tokens((200, 13)))  # evicts what that one left, and nothing older
  assert h.held(tokens((200, 13))) == (12, 12)
  request = h.add(tokens((300, 13)))
  h.prefill(request)
  h.step_done()
  h.finish(request)
  h.controller.reset()
  assert h.flush() is None  # its backup was due


def test_cache_off_matches_nothing_and_keeps_nothing():
  h = Harness(enabled=False)
  first = h.run(tokens((0, 9)), outputs=6)
  second = h.run(tokens((0, 9)), outputs=6)
  assert h.contexts[first] == h.contexts[second]
  assert h.hits(second) == (0, 0)
  assert h.computed[second] == [(0, 9)]
  assert not h.controller.tree.nodes
  assert h.controller.tiers.device.used_pages == 0
  waiting = h.add(tokens((0, 9)))
  assert h.path(waiting) == [("absent", 8)]
  h.prefill(waiting, chunk=4)
  h.step_done()
  (running,) = h.view().running
  assert [(s.state, s.tokens) for s in running.path] == [("absent", 4)]
  assert running.remaining_prefill_tokens == 5
  h.prefill(waiting)
  h.step_done()
  h.finish(waiting)


def test_salts_and_adapters_share_nothing():
  h = Harness(device_pages=64)
  names = [{}, {"salt": "X"}, {"adapter": "X"}, {"salt": "X", "adapter": "X"}]
  runs = [h.run(tokens((0, 9)), **name) for name in names]
  assert [h.hits(run) for run in runs] == [(0, 0)] * 4
  assert h.hits(h.run(tokens((0, 9)), adapter="X")) == (8, 0)


def test_twins_keep_their_own_pages():
  h = Harness()
  first, second = h.add(tokens((0, 9)), outputs=6), h.add(tokens((0, 9)), outputs=6)
  h.prefill(first, second)
  h.step_done()
  assert h.controller.stats.duplicate_tokens == 8
  for _ in range(5):
    h.view()
    h.apply(decode=(first, second))
    h.step_done()
  assert h.contexts[first] == h.contexts[second]
  h.finish(first)
  used = h.controller.tiers.device.used_pages
  h.finish(second)
  assert h.controller.tiers.device.used_pages < used  # only now its duplicates are freed
  h.flush()
  h.transfers_done()
  assert h.free_pages() == (16, 64)


def test_an_admission_that_does_not_fit_changes_nothing():
  h = Harness(device_pages=8, host_pages=0)
  h.run(tokens((0, 13)))
  running = h.add(tokens((100, 12)), outputs=4)
  h.prefill(running)
  h.step_done()
  late = h.add(tokens((0, 13), (200, 8)))
  view = h.view()
  before = (view.free_pages, view.evictable_pages, copy.deepcopy(h.controller.tree.pages))
  entry = h.entry(view, late)
  assert entry.compute_start == 12
  applied = h.apply(prefill=(entry,))  # its own hit is not evicted for it
  assert applied.stale == (late,)
  assert applied.work is None
  view = h.view()
  assert (view.free_pages, view.evictable_pages, h.controller.tree.pages) == before
  assert h.path(late)[0] == ("device", 12)
  h.finish(running)
  h.prefill(late)
  h.step_done()
  assert h.hits(late) == (12, 0)


def test_an_entry_does_not_evict_the_hit_of_another():
  h = Harness(device_pages=6)
  h.run(tokens((0, 9)))  # the older one
  h.run(tokens((50, 9)))
  first, second = h.add(tokens((100, 8))), h.add(tokens((0, 9)))
  view = h.view()
  applied = h.apply(prefill=(h.entry(view, first), h.entry(view, second)))
  assert not applied.stale
  assert h.hits(second) == (8, 0)
  assert h.held(tokens((50, 9)))[0] == 4


def test_a_hit_may_be_used_in_part():
  h = Harness(device_pages=8, host_pages=0)
  h.run(tokens((0, 17)))
  request = h.add(tokens((0, 17)))
  h.view()
  applied = h.apply(prefill=(Prefill(request, (), 8, 17),))
  assert not applied.stale
  assert h.hits(request) == (8, 0)
  h.step_done()
  assert h.computed[request] == [(8, 17)]
  h.finish(request)
  assert h.held(tokens((0, 17)))[0] == 16


def test_evicting_frees_the_shortfall():
  h = Harness(device_pages=8, host_pages=0)
  h.run(tokens((0, 24)))
  h.run(tokens((100, 12)))  # 2 pages are free, 1 more is needed
  assert h.held(tokens((0, 24)))[0] == 20
  assert h.controller.stats.evicted_device_pages == 1


def test_a_plan_for_another_cache_state_is_stale():
  h = Harness()
  h.run(tokens((0, 9)))
  request = h.add(tokens((0, 9)))
  view = h.view()
  entry = h.entry(view, request)
  h.controller.tiers.device.free(
    np.concatenate(list(h.controller.tree.evict(0, 99)))
  )  # what a step that ran meanwhile may do
  applied = h.apply(prefill=(entry, Prefill(99, (), 0, 4)), decode=(98,), preempt=(97,))
  assert sorted(applied.stale) == [request, 97, 98, 99]
  assert h.controller.stats.stale_entries == 4
  h.prefill(request)
  h.step_done()


@pytest.mark.parametrize(
  ("start", "end", "wrong"),
  [(0, 10, "chunk in"), (2, 9, "compute_start"), (0, 6, "compute_end"), (8, 8, "chunk in")],
)
def test_a_plan_that_can_never_be_right_is_an_error(start, end, wrong):
  h = Harness()
  request = h.add(tokens((0, 9)))
  view = h.view()
  with pytest.raises(ValueError, match=wrong):
    h.apply(prefill=(Prefill(request, (), start, end),))
  with pytest.raises(ValueError, match=r"plan\.version"):
    h.apply(version=view.version + 1)
  entry = h.entry(h.view(), request)
  with pytest.raises(ValueError, match="each request once"):
    h.apply(prefill=(entry, entry))
  assert h.path(request) == [("in_queue", 8)]


def test_a_wrong_plan_changes_nothing():
  h = Harness(device_pages=32)
  first, second, third = (h.add(tokens((100 * i, 9))) for i in range(3))
  h.run(tokens((0, 9)))
  view = h.view()
  right = h.entry(view, first)
  assert right.compute_start == 8
  with pytest.raises(ValueError, match="compute_end"):
    h.apply(
      refused=(Refused(third, "full"),), prefill=(right, Prefill(second, (), 0, 5)),
    )  # fmt: skip
  assert [r.request_id for r in h.view().waiting] == [first, second, third]
  assert h.controller.tree.pages[0].protected == 0


def test_of_two_decodes_only_those_that_find_pages_run():
  h = Harness(page_size=2, device_pages=5, host_pages=0)
  first, second = h.add(tokens((0, 4)), outputs=3), h.add(tokens((50, 4)), outputs=3)
  h.prefill(first, second)
  h.step_done()
  h.view()
  applied = h.apply(decode=(first, second))  # each needs a page, one is left
  assert applied.stale == (second,)
  assert [decode.request_id for decode in applied.work.decodes] == [first]


def test_no_plan_while_a_step_is_under_way():
  h = Harness()
  request = h.add(tokens((0, 9)))
  h.prefill(request)
  with pytest.raises(RuntimeError, match="under way"):
    h.controller.apply(StepPlan(version=1), 0.0)
  h.step_done()
  with pytest.raises(ValueError, match="step under way"):
    h.controller.complete(StepDone(0, 0.0, 0.0, {}), 0.0)
  with pytest.raises(ValueError, match="transfer under way"):
    h.controller.complete(LoadDone(12, 0.0), 0.0)


def test_preempted_requests_come_back_at_their_place():
  h = Harness(page_size=2, device_pages=32)
  first, second = h.add(tokens((0, 7)), outputs=8), h.add(tokens((50, 5)), outputs=2)
  h.view()
  h.apply(postponed=(first,))
  h.view()
  h.apply(bypassed=(first,))
  assert (h.waiting(first).postponements, h.waiting(first).bypasses) == (1, 1)
  h.prefill(first)
  h.step_done()
  for _ in range(3):
    h.view()
    h.apply(decode=(first,))
    h.step_done()
  h.view()
  applied = h.apply(preempt=(first,))
  assert applied.preempted == (first,)
  view = h.view()
  assert [r.request_id for r in view.waiting] == [first, second]
  again = view.waiting[0]
  assert (again.postponements, again.bypasses) == (0, 0)  # its waiting starts anew
  assert again.computed_tokens == 10
  assert again.prompt_tokens == 11
  assert again.output_reserve_tokens == 3  # of the last of four there will be no KV
  h.prefill(first)
  h.step_done()
  admission = h.admissions[first][1]
  assert admission.readmitted
  assert admission.device_hit_tokens == 0  # all of it had been counted or computed before
  assert admission.compute_tokens == 1
  for _ in range(3):
    h.view()
    h.apply(decode=(first,))
    h.step_done()
  assert len(h.contexts[first]) == 7 + 8
  h.finish(first)
  assert h.controller.stats.preempted == 1


def test_tokens_computed_again_after_a_preemption_are_counted():
  h = Harness(page_size=2, device_pages=8, host_pages=0)
  first = h.add(tokens((0, 7)), outputs=4)
  h.prefill(first)
  h.step_done()
  h.view()
  h.apply(preempt=(first,))
  h.run(tokens((100, 15)))  # drops all of it
  h.prefill(first)
  h.step_done()
  assert h.admissions[first][1].compute_tokens == 8
  assert h.controller.stats.recomputed_tokens == 7
  h.finish(first)


def test_views_are_rebuilt_only_where_something_changed():
  h = Harness(device_pages=32)
  first, other = h.add(tokens((0, 9))), h.add(tokens((50, 9)))
  before = h.view()
  assert h.view().waiting is before.waiting
  h.prefill(first)
  h.step_done()
  after = h.view()
  assert after.waiting[0] is before.waiting[1]
  assert [r.request_id for r in after.waiting] == [other]
  h.finish(first)
  h.view()
  assert after == after  # frozen: later changes do not reach it
  twin = h.add(tokens((0, 9)))
  assert h.path(twin) == [("device", 8)]


def test_running_views():
  h = Harness(page_size=4, device_pages=32, host_pages=0, step_tokens=8)
  request = h.add(tokens((0, 18)), outputs=6, tenant="t")
  h.prefill(request, chunk=8)
  h.step_done()
  (running,) = h.view().running
  assert running.phase == "prefill"
  assert running.context_tokens == 8
  assert running.remaining_prefill_tokens == 10
  assert [(s.state, s.tokens) for s in running.path] == [("in_flight", 8)]
  assert running.tail_tokens == 2
  assert running.held_pages == 5
  assert running.tenant == "t"
  view = h.view()
  (node_id,) = view.in_flight
  assert view.in_flight[node_id] == (request, 8)
  h.prefill(request)
  h.step_done()
  view = h.view()
  (running,) = view.running
  assert not view.in_flight
  assert (running.phase, running.context_tokens, running.next_pages) == ("decode", 18, 0)
  assert running.output_tokens_left == 5
  for _ in range(2):
    h.apply(decode=(request,))
    h.step_done()
    (running,) = h.view().running
  assert (running.context_tokens, running.next_pages, running.held_pages) == (20, 1, 5)
  h.apply(decode=(request,))
  h.step_done()
  assert h.view().running[0].held_pages == 6
  sharer = h.add(tokens((0, 17)))
  h.prefill(sharer)
  h.step_done()
  assert [r.held_pages for r in h.view().running] == [2, 1]  # four pages are used by both


def test_deferrals_count_only_without_progress():
  h = Harness(page_size=4, device_pages=64, step_tokens=8)
  first, twin = h.add(tokens((0, 41))), h.add(tokens((0, 41)))
  view = h.view()
  node_id = view.waiting[1].path[0].node_id
  defer = (Deferred(twin, "claimed", (node_id,)),)
  h.apply(prefill=(h.entry(view, first, chunk=8),), deferred=defer)
  h.step_done()
  waiting = h.waiting(twin)
  assert waiting.front
  assert waiting.after == (node_id,)
  for expected in (0, 0, 1, 2):
    view = h.view()
    path = view.waiting[0].path
    deferred = (Deferred(twin, "in_flight", (path[-1].node_id,)),)
    if expected == 0:
      h.apply(prefill=(h.entry(view, first, chunk=8),), deferred=deferred)
      h.step_done()
    else:  # the producer pauses
      h.apply(deferred=deferred)
    assert h.waiting(twin).deferrals == max(expected - 1, 0)
  h.view()
  h.apply(postponed=(twin,), bypassed=(twin,))
  waiting = h.waiting(twin)
  assert waiting.front  # its producer is not done yet
  assert (waiting.postponements, waiting.bypasses) == (1, 1)
  h.prefill(first)
  h.step_done()
  h.view()
  h.apply(postponed=(twin,))
  assert not h.waiting(twin).front  # considered once
  h.prefill(twin)
  h.step_done()
  assert h.hits(twin) == (40, 0)
  assert h.admissions[twin][0].delay_hit_tokens == 40


def test_waiting_requests_are_seen_in_arrival_order():
  h = Harness()
  ids = [h.add(tokens((100 * i, 9))) for i in range(4)]
  h.abort(ids[1])
  assert [r.request_id for r in h.view().waiting] == [ids[0], ids[2], ids[3]]
