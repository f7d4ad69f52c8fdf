import dataclasses

import pytest

from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import schedule
from strata_jax.scheduler.views import ParkedView, RunningView
from tests.scheduler.build import admitted, budgets, decodes, view, waits

STRATA = SchedulerConfig()
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
  assert plan.prefill[1] == (2, (), 0, 40)
