import dataclasses

import pytest

from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import schedule
from strata_jax.scheduler.views import Costs, ParkedView, RunningView
from tests.scheduler.build import admitted, budgets, decodes, view, waits

STRATA = SchedulerConfig()
BATCHES = SchedulerConfig(rolling_loads=False)
HEAVY = waits(0, (1, 50_000, "host"), tail=100)
PARKED = RunningView(request_id=0, phase="parked", arrival_s=0.0, context_tokens=50_000)


def test_a_loading_bound_batch_waits_beside_decodes():
  plan = schedule(view(HEAVY, running=(decodes(9),)), STRATA)
  assert (admitted(plan), plan.park, plan.decode) == ([0], (0,), (9,))


@pytest.mark.parametrize(
  ("running", "changes"),
  [
    ((), {}),  # nothing to fill the bubble with
    ((decodes(9),), {"bubble_filling": False}),
    ((decodes(9),), {"ratio_threshold": 500.0}),
  ],
)
def test_otherwise_it_computes(running, changes):
  plan = schedule(view(HEAVY, running=running), dataclasses.replace(STRATA, **changes))
  assert (admitted(plan), plan.park) == ([0], ())


def test_requests_without_loads_compute_meanwhile():
  waiting = (HEAVY, waits(1, (1, 50_000, "host"), tail=1), waits(2, tail=20))
  plan = schedule(view(*waiting, running=(decodes(9),)), STRATA)
  assert (admitted(plan), plan.park, plan.bundled) == ([0, 1, 2], (0, 1), (1,))


@pytest.mark.parametrize(
  ("left", "changes", "resumes"),
  [
    (10_001, {}, False),
    (10_000, {}, True),
    (1, {"layerwise": False}, False),
    (0, {"layerwise": False}, True),
    (50_000, {"bubble_filling": False}, True),
  ],
)
def test_it_resumes_when_the_rest_of_the_load_does_not_bound_it(left, changes, resumes):
  one = view(running=(decodes(9), PARKED), parked=ParkedView((0,), left, 100), loading={1: left})
  plan = schedule(one, dataclasses.replace(STRATA, **changes))
  assert plan.resume == ((0,) if resumes else ())
  assert plan.decode == (9,)


def test_it_resumes_when_nothing_decodes_any_more():
  one = view(running=(PARKED,), parked=ParkedView((0,), 40_000, 100), loading={1: 40_000})
  assert schedule(one, STRATA).resume == (0,)


def test_a_resumed_batch_keeps_its_tokens_and_the_next_may_be_parked():
  nxt = waits(1, (2, 50_000, "host"), tail=60)
  one = view(
    nxt, waits(2, tail=90), running=(decodes(9), PARKED), parked=ParkedView((0,), 0, 100),
    budgets=budgets(step_tokens=200),
  )  # fmt: skip
  plan = schedule(one, STRATA)
  assert (plan.resume, admitted(plan), plan.park) == ((0,), [1, 2], (1,))
  assert plan.prefill[1] == (2, (), 0, 90)
  plan = schedule(one, BATCHES)  # the published rule: one batch, one budget
  assert (plan.resume, admitted(plan), plan.park) == ((0,), [1, 2], (1,))
  assert plan.prefill[1] == (2, (), 0, 40)


def _window(*left: int | None, decode: bool = True):
  """Parked requests with so many tokens of their loads left each, and two that wait to load."""
  parked = tuple(
    PARKED._replace(request_id=i, load_tokens_left=tokens, remaining_prefill_tokens=10)
    for i, tokens in enumerate(left)
  )
  return view(
    waits(20, (20, 40_000, "host"), tail=10),
    waits(21, (21, 40_000, "host"), tail=10),
    running=(*parked, *((decodes(9),) if decode else ())),
    parked=ParkedView(tuple(range(len(left))), sum(t or 0 for t in left), 10 * len(left)),
    budgets=budgets(batch_requests=3),
  )


def test_rolling_loads_resume_one_by_one_and_others_join():
  plan = schedule(_window(0, 9_000, 9_000), STRATA)
  assert (plan.resume, admitted(plan), plan.park) == ((0,), [20], (20,))
  plan = schedule(_window(9_000, 9_000), STRATA)
  assert (plan.resume, admitted(plan), plan.park) == ((), [20], (20,))
  plan = schedule(_window(9_000, 9_000, 9_000), STRATA)
  assert (plan.resume, admitted(plan)) == ((), [])
  plan = schedule(_window(0, 9_000, 9_000), BATCHES)
  assert (plan.resume, admitted(plan)) == ((), [])


def test_one_resumes_however_few_tokens_a_step_has():
  one = _window(0, 9_000)
  few = dataclasses.replace(
    one, parked=ParkedView((0, 1), 9_000, 600), budgets=budgets(step_tokens=5)
  )
  assert schedule(few, STRATA).resume == (0,)


def test_with_nothing_else_to_run_the_first_resumes():
  plan = schedule(_window(9_000, 9_000, decode=False), STRATA)
  assert plan.resume == (0,)
  plan = schedule(_window(9_000, 9_000, decode=False), BATCHES)
  assert plan.resume == (0, 1)


def test_unknown_progress_resumes_as_a_batch():
  assert schedule(_window(None, None), STRATA).resume == (0, 1)
  one = dataclasses.replace(_window(None, None), parked=ParkedView((0, 1), 9_000, 20))
  assert schedule(one, STRATA).resume == ()


def test_a_load_that_comes_within_a_decode_step_does_not_wait_for_it():
  costs = Costs(load_s_per_token=1e-6, decode_step_s=0.018)
  assert schedule(_window(9_000, 9_000), STRATA).resume == ()
  assert schedule(dataclasses.replace(_window(9_000, 9_000), costs=costs), STRATA).resume == (0, 1)


def test_others_join_while_few_loads_are_on_their_way():
  costs = Costs(load_s_per_token=1e-5)  # 0.2 s are 20,000 tokens
  for left, expected in ((21_000, []), (19_000, [20])):
    one = dataclasses.replace(_window(left), costs=costs, budgets=budgets())
    assert admitted(schedule(one, STRATA)) == expected
  everybody = dataclasses.replace(STRATA, window_s=10.0)
  one = dataclasses.replace(_window(21_000), costs=costs, budgets=budgets())
  assert admitted(schedule(one, everybody)) == [20, 21]


def test_waiting_for_the_window_is_no_bypass_unless_a_later_one_loads():
  one = _window(9_000, 9_000, 9_000)
  light = waits(30, tail=5)
  plan = schedule(dataclasses.replace(one, waiting=(*one.waiting, light)), STRATA)
  assert (admitted(plan), plan.bypassed, plan.postponed) == ([30], (), ())
  later = waits(31, (31, 160, "host"), tail=3)  # 4 tokens are left to those who join
  chunks = dataclasses.replace(
    one, waiting=(one.waiting[0], later), parked=ParkedView((0,), 9_000, 60),
    budgets=budgets(page_size=16, step_tokens=64),
  )  # fmt: skip
  plan = schedule(chunks, STRATA)
  assert (admitted(plan), plan.bypassed) == ([31], (20,))


def test_an_urgent_one_that_waits_for_the_window_is_next_to_load():
  costs = Costs(load_s_per_token=1e-5)
  urgent = waits(20, (20, 40_000, "host"), tail=10, bypasses=8)
  bundle = waits(22, (0, 9_000, "loading"), tail=5)
  one = dataclasses.replace(
    _window(21_000), costs=costs, budgets=budgets(), waiting=(urgent, bundle, waits(30, tail=5))
  )
  assert admitted(schedule(one, STRATA)) == [22, 30]
  small = waits(31, (31, 160, "host"), tail=3)
  chunks = dataclasses.replace(
    one, waiting=(urgent, small), budgets=budgets(page_size=16, step_tokens=64),
    parked=ParkedView((0,), 9_000, 60),
  )  # fmt: skip
  assert admitted(schedule(chunks, STRATA)) == []  # 4 tokens are left: enough for the later one
  assert admitted(schedule(dataclasses.replace(chunks, waiting=(small,)), STRATA)) == [31]
  no_room = dataclasses.replace(one, parked=ParkedView((0,), 9_000, 10), free_pages=30_000)
  assert admitted(schedule(no_room, STRATA)) == []  # it is pages that it lacks now
