import dataclasses

import pytest

from strata_jax.scheduler.config import PROFILED, SchedulerConfig
from strata_jax.scheduler.policies import schedule
from strata_jax.scheduler.views import Costs
from tests.scheduler.build import admitted, budgets, view, waits

STRATA = SchedulerConfig()
PAIR = budgets(batch_requests=2)


def _heavy(request_id: int, node: int, **more):
  return waits(request_id, (node, 50_000, "host"), tail=10, **more)


def test_the_head_is_taken_whatever_it_loads():
  assert admitted(schedule(view(_heavy(0, 1)), STRATA)) == [0]


def test_the_postponed_keep_their_order_and_refill_the_batch():
  one = view(_heavy(0, 1), _heavy(1, 2), _heavy(2, 3), waits(3, tail=10))
  plan = schedule(one, STRATA)
  assert (admitted(plan), plan.postponed) == ([0, 3, 1, 2], ())
  plan = schedule(one, dataclasses.replace(STRATA, refill=False))
  assert (admitted(plan), plan.postponed) == ([0, 3], (1, 2))
  assert schedule(one, dataclasses.replace(STRATA, refill=False, bundles=False)) == plan
  plan = schedule(dataclasses.replace(one, budgets=budgets(batch_requests=3)), STRATA)
  assert (admitted(plan), plan.postponed, plan.bypassed) == ([0, 3, 1], (2,), ())


@pytest.mark.parametrize(("now", "postponed"), [(4_000, (1,)), (8_000, ())])
def test_the_ratio_counts_the_tokens_of_this_step(now, postponed):
  """The head computes 4,000 of its 100,000 tokens now: not enough for 480,000 to load."""
  one = view(
    waits(0, tail=100_000), waits(1, (1, 480_000, "host"), tail=10),
    budgets=budgets(page_size=4_000, step_tokens=now + 2_000),
  )  # fmt: skip
  plan = schedule(one, dataclasses.replace(STRATA, refill=False))
  assert plan.prefill[0] == (0, (), 0, now)
  assert plan.postponed == postponed


def test_who_computes_enough_for_its_own_loads_improves_a_bad_batch():
  own = waits(1, (2, 5_000, "host"), tail=100)
  plan = schedule(view(_heavy(0, 1), own, budgets=PAIR), STRATA)
  assert (admitted(plan), plan.postponed) == ([0, 1], ())


def test_urgent_skips_the_ratio():
  one = view(waits(0, tail=10), _heavy(1, 1), waits(2, tail=10), budgets=PAIR)
  assert admitted(schedule(one, STRATA)) == [0, 2]
  one = view(waits(0, tail=10), _heavy(1, 1, postponements=8), waits(2, tail=10), budgets=PAIR)
  assert admitted(schedule(one, STRATA)) == [1, 0]


def test_a_bundle_hit_that_can_never_fit_is_refused_once():
  one = view(
    waits(0, (1, 500, "host"), tail=10), waits(1, (1, 500, "host"), tail=900), capacity_pages=1_000,
  )  # fmt: skip
  plan = schedule(one, STRATA)
  assert (admitted(plan), [request_id for request_id, _ in plan.refused]) == ([0], [1])


def test_bundle_hits_join_behind_the_one_that_loads():
  one = view(
    waits(0, (1, 20_000, "host"), tail=300),
    waits(1, tail=5),
    waits(2, (1, 20_000, "host"), (2, 100, "host"), tail=5),
    waits(3, (1, 20_000, "host"), (3, 101, "host"), tail=5),
    waits(4, (1, 20_000, "host"), tail=5),
  )
  plan = schedule(one, STRATA)
  assert (admitted(plan), plan.bundled) == ([0, 2, 4, 1, 3], (2, 4))
  plan = schedule(one, dataclasses.replace(STRATA, bundles=False))
  assert (admitted(plan), plan.bundled) == ([0, 1, 2, 3, 4], ())
  plan = schedule(one, dataclasses.replace(STRATA, balance=False))
  assert plan.bundled == (2, 4)


def test_bundles_skip_the_ratio_never_the_capacity():
  alike = [waits(i, (1, 50_000, "host"), (10 + i, 90, "host"), tail=1) for i in range(3)]
  assert schedule(view(*alike), STRATA).bundled == (1, 2)
  assert schedule(view(*alike, free_pages=50_000 + 91 + 91), STRATA).bundled == (1,)


def test_the_postponed_are_bundle_hits_of_who_loads_their_context_after_all():
  """3 shares what 1 loads; 2 would load as much again."""
  one = view(waits(0), _heavy(1, 1), _heavy(2, 2), _heavy(3, 1), budgets=budgets(batch_requests=3))
  plan = schedule(one, STRATA)
  assert (admitted(plan), plan.bundled, plan.postponed) == ([0, 1, 3], (3,), (2,))
  later = waits(2, (1, 50_000, "host"), tail=1_000)  # computes enough for its loads
  plan = schedule(view(waits(0), _heavy(1, 1), later), dataclasses.replace(STRATA, refill=False))
  assert (admitted(plan), plan.bundled, plan.postponed) == ([0, 2, 1], (1,), ())


def test_without_loads_nobody_is_a_bundle_hit():
  plan = schedule(view(_heavy(0, 1), waits(1), waits(2)), STRATA)
  assert plan.bundled == ()


@pytest.mark.parametrize(
  ("changes", "costs", "postponed"),
  [
    ({}, Costs(), False),
    ({"ratio_threshold": 10.0}, Costs(), True),
    ({"ratio_threshold": PROFILED}, Costs(), False),
    ({}, Costs(load_s_per_token=1e-6, compute_s_per_token=1e-5), False),
    (
      {"ratio_threshold": PROFILED},
      Costs(load_s_per_token=1e-6, compute_s_per_token=1e-5),
      True,
    ),
    (
      {"balance_by": "predicted_seconds"},
      Costs(load_s_per_token=1e-6, compute_s_per_token=1e-5),
      True,
    ),
    (
      {"balance_by": "predicted_seconds"},
      Costs(load_s_per_token=1e-7, compute_s_per_token=1e-5),
      False,
    ),
    (
      {"balance_by": "predicted_seconds", "seconds_threshold": 0.1},
      Costs(load_s_per_token=1e-7, compute_s_per_token=1e-5),
      True,
    ),
  ],
)
def test_the_predicate_is_a_choice(changes, costs, postponed):
  """Load ratio 50: 5,000 tokens to load, 100 to compute."""
  loads = waits(1, (1, 5_000, "host"), tail=50)
  one = view(waits(0, tail=50), loads, costs=costs)
  config = dataclasses.replace(STRATA, refill=False, **changes)
  assert (schedule(one, config).postponed == (1,)) == postponed


def test_bypassed_are_those_before_a_later_admission_and_nobody_else():
  one = view(
    waits(0, tail=90), waits(1, tail=90), waits(2, tail=5), waits(3, tail=90), free_pages=50
  )
  plan = schedule(one, STRATA)
  assert (admitted(plan), plan.bypassed) == ([2], (0, 1))


def test_bundle_hits_do_not_pass_urgent_requests():
  path = (1, 20_000, "host")
  one = view(
    waits(0, path, tail=5, bypasses=8), waits(1, tail=50, bypasses=8), waits(2, path, tail=50),
    free_pages=20_000 + 5 + 50,
  )  # fmt: skip
  assert admitted(schedule(one, STRATA)) == [0, 1]
