"""Whole policies: golden traces, the cases they stand for, and what no switch may change."""

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax import recording, testing
from strata_jax.scheduler import defer, form_batch
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import (
  POLICIES,
  make_policy,
  plan_step,
  policy_config,
  schedule,
  stages_of,
)
from strata_jax.scheduler.views import ParkedView, Producer, SchedulerView
from strata_jax.toy_system import ToyRequest, ToySystem
from tests.scheduler import golden_cases
from tests.scheduler.build import admitted, budgets, decodes, deferred, prefills, view, waits

STRATA = SchedulerConfig()
FCFS = policy_config("fcfs")


@pytest.mark.parametrize("name", golden_cases.CASES)
def test_golden(name):
  path = golden_cases.FOLDER / f"{name}.jsonl"
  config, views = golden_cases.CASES[name]()
  record = recording.read_record(path)
  decisions = list(record.decisions())
  assert record.config == config
  assert [one for one, _ in decisions] == list(views)
  for one, plan in decisions:
    assert schedule(one, config) == plan
    testing.check_plan(one, plan)


def test_no_golden_file_without_a_case():
  assert {path.stem for path in golden_cases.FOLDER.glob("*")} == set(golden_cases.CASES)


def _plans(name: str, config: SchedulerConfig | None = None):
  own, views = golden_cases.CASES[name]()
  return [schedule(one, config or own) for one in views]


def test_worked_example_lowers_the_ratio_from_512_to_56_9():
  (plan,) = _plans("worked_example")
  assert admitted(plan) == [0, 2]
  loads = sum(tokens for entry in plan.prefill for _, tokens in entry.loads)
  computes = [entry.compute_end - entry.compute_start for entry in plan.prefill]
  assert loads / computes[0] == 512
  assert round(loads / sum(computes), 1) == 56.9
  (unbalanced,) = _plans("worked_example", dataclasses.replace(STRATA, balance=False))
  assert admitted(unbalanced) == [0, 1]


def test_two_cold_twins_one_runs_one_waits():
  (plan,) = _plans("two_cold_twins")
  assert (admitted(plan), deferred(plan)) == ([0], [1])
  (off,) = _plans("two_cold_twins", dataclasses.replace(STRATA, deferral=False))
  assert (admitted(off), deferred(off)) == ([0, 1], [])


def test_one_of_each_group():
  (plan,) = _plans("groups")
  assert admitted(plan) == list(range(0, 220, 10))
  assert len(plan.deferred) == 198


def test_twin_of_the_running_batch_waits_at_the_front():
  (plan,) = _plans("twin_of_the_running_batch")
  assert plan.deferred == ((1, "in_flight", (1,)),)


def test_shared_host_prefix_is_loaded_and_counted_once():
  (plan,) = _plans("three_share_a_host_prefix")
  assert admitted(plan) == [0, 1, 2]
  assert [entry.loads for entry in plan.prefill] == [((1, 8_000),), (), ()]
  own, (one,) = golden_cases.CASES["three_share_a_host_prefix"]()
  assert admitted(schedule(dataclasses.replace(one, free_pages=8_299), own)) == [0, 1]


def test_device_host_and_missing_in_one_prompt():
  fits, full = _plans("device_host_missing")
  assert fits.prefill == ((0, ((2, 2_048),), 1_024 + 2_048, 1_024 + 2_048 + 517),)
  assert full.prefill == ()  # its own device pages are no room for it


def test_released_when_the_shared_part_is_there():
  plans = _plans("long_prompt_in_chunks")
  assert [admitted(plan) for plan in plans] == [[0], [0], [0], [0, 1]]
  assert plans[3].prefill[1] == (1, (), 60_000, 60_501)


def test_a_deferred_only_round_starts_nothing():
  twin = waits(1, (1, 5_000, "in_flight"))
  running = decodes(0)._replace(phase="parked")
  one = view(twin, running=(running,), in_flight={1: (0, 5_000)})
  plan = schedule(one, STRATA)
  assert plan.is_idle
  assert deferred(plan) == [1]
  assert schedule(view(), STRATA).is_idle


def test_an_urgent_request_is_first_never_deferred_and_blocks_the_rest():
  urgent = waits(1, (1, 5_000, "in_flight"), deferrals=8)
  one = view(waits(0, tail=10), urgent, in_flight={1: (9, 5_000)})
  assert admitted(schedule(one, STRATA)) == [1, 0]
  too_big = dataclasses.replace(one, free_pages=100)
  assert admitted(schedule(too_big, STRATA)) == []
  assert admitted(schedule(too_big, dataclasses.replace(STRATA, max_deferrals=math.inf))) == [0]


def test_nobody_becomes_urgent_for_waiting_on_a_parked_producer():
  parked = decodes(0)._replace(phase="parked")
  often = waits(1, (1, 5_000, "in_flight"), deferrals=30, front=True)
  for left, expected in ((40_000, [1]), (0, [])):
    one = view(
      often, running=(decodes(9), parked), in_flight={1: Producer(0, 5_000)},
      parked=ParkedView((0,), left, 100), loading={7: left},
    )  # fmt: skip
    assert deferred(schedule(one, STRATA)) == expected
  one = view(  # another computes what it waits for, while somebody's loads run
    often, running=(decodes(8), prefills(9, 100, (1, 5_000, "in_flight")), parked),
    in_flight={1: Producer(9, 5_000)}, parked=ParkedView((0,), 40_000, 100), loading={7: 40_000},
  )  # fmt: skip
  plan = schedule(one, STRATA)
  assert (admitted(plan), deferred(plan), plan.resume) == ([9, 1], [], ())


def test_what_can_never_fit_is_refused():
  plan = schedule(view(waits(0, tail=101), waits(1, tail=5), capacity_pages=100), STRATA)
  assert [r.request_id for r in plan.refused] == [0]
  assert admitted(plan) == [1]


def test_while_a_batch_is_parked_others_that_load_join_it_or_wait():
  _, loading, *_ = _plans("parked_batch")
  assert (admitted(loading), loading.resume) == ([2], ())
  own, (_, one, *_) = golden_cases.CASES["parked_batch"]()
  more = dataclasses.replace(one, waiting=(waits(3, (7, 500, "host")), *one.waiting))
  plan = schedule(more, own)
  assert (admitted(plan), plan.park) == ([3, 2], (3,))
  plan = schedule(more, dataclasses.replace(own, rolling_loads=False))
  assert (admitted(plan), plan.park) == ([2], ())


def test_unknown_policy():
  with pytest.raises(ValueError, match="expected one of fcfs"):
    make_policy("best")


def random_views(seed: int, policy) -> list[SchedulerView]:
  """Views that a random small workload leads to."""
  rng = random.Random(seed)
  system = ToySystem(
    testing.TOY_BUDGETS, device_pages=rng.choice((64, 256)), load_tokens_per_round=64
  )
  seen: list[SchedulerView] = []

  def watched(one):
    seen.append(one)
    plan = policy(one)
    testing.check_plan(one, plan)
    return plan

  for request_id in range(40):
    depth = rng.randint(0, 3)
    blocks = tuple((str(rng.randint(0, 1)), rng.choice((16, 128, 512))) for _ in range(depth))
    if sum(tokens for _, tokens in blocks) > 900:
      blocks = ()
    request = ToyRequest(
      request_id=request_id, blocks=blocks, tail_tokens=rng.randint(1, 60),
      output_tokens=rng.randint(1, 12),
    )  # fmt: skip
    system.add(request, cached=rng.choice(("", "", "host", "device")) if depth < 3 else "")
    if rng.random() < 0.6:
      system.step(watched)
  for _ in range(60):
    system.step(watched)
  return seen


@pytest.mark.parametrize("policy", ["strata", "fcfs"])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_mechanism_switched_off_is_identical_to_its_absence(policy, seed):
  never = dataclasses.replace(
    STRATA,
    deferral_threshold_tokens=math.inf,
    ratio_threshold=math.inf,
    bundle_min_shared_tokens=math.inf,
  )
  no_deferral = dataclasses.replace(STRATA, deferral=False)
  no_bundles = dataclasses.replace(STRATA, bundles=False)
  only_bundles = dataclasses.replace(STRATA, balance=False)
  for one in random_views(seed, make_policy(policy)):
    assert schedule(one, never) == schedule(one, FCFS)
    absent = dataclasses.replace(stages_of(STRATA), defer=defer.never)
    assert schedule(one, no_deferral) == plan_step(one, STRATA, absent)
    far = dataclasses.replace(STRATA, bundle_min_shared_tokens=math.inf)
    assert schedule(one, no_bundles) == schedule(one, far)
    off = dataclasses.replace(only_bundles, bundles=False)
    absent = dataclasses.replace(stages_of(only_bundles), form_batch=form_batch.in_order)
    assert schedule(one, off) == plan_step(one, only_bundles, absent)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_passes_the_checks(name):
  testing.check_policy(schedule, config=policy_config(name), bounded=name != "strata_paper")


def test_the_published_rule_starves_and_ours_does_not():
  for scenario in testing.SCENARIOS:
    if scenario.name not in ("fronts before a loader", "big among small"):
      continue
    longer = dataclasses.replace(scenario, rounds=300)
    published = testing.run_scenario(longer, make_policy("strata_paper"), bounded=False)
    assert testing.VICTIM in published.live
    assert published.longest_passed_rounds > 100
    ours = testing.run_scenario(scenario, make_policy("strata"))
    assert testing.VICTIM in ours.finished
    assert ours.longest_passed_rounds <= 16


@settings(max_examples=10, deadline=None)
@given(
  limit=st.integers(1, 6),
  seed=st.integers(0, 1_000),
  name=st.sampled_from(sorted(POLICIES)),
  join_loading=st.booleans(),
)
def test_waiting_is_bounded_for_every_limit(limit, seed, name, join_loading):
  if name == "strata_paper":
    return
  config = dataclasses.replace(
    policy_config(name), max_deferrals=limit, max_postponements=limit, max_bypasses=limit,
    join_loading=join_loading,
  )  # fmt: skip
  if name == "strata":
    config = dataclasses.replace(config, order="most_shared")
  for scenario in testing.SCENARIOS:
    shorter = dataclasses.replace(scenario, rounds=40)
    testing.run_scenario(shorter, lambda one: schedule(one, config), config=config, seed=seed)


def test_deferral_computes_a_shared_prompt_once():
  scenario = next(s for s in testing.SCENARIOS if s.name == "twins of twins")
  with_deferral = testing.run_scenario(scenario, make_policy("strata"))
  without = testing.run_scenario(scenario, make_policy("fcfs"))
  assert with_deferral.computed_tokens < 0.7 * without.computed_tokens


def test_a_prompt_under_way_leaves_tokens_to_released_requests_only():
  running = prefills(0, 1_000, (2, 9_000, "in_flight"))
  hit = waits(1, (1, 1_000, "device"), tail=100)
  for front, end in ((True, 1_000 + 3_900), (False, 1_000 + 4_000)):
    one = view(
      dataclasses.replace(hit, front=front), running=(running,), budgets=budgets(step_tokens=4_000)
    )
    assert schedule(one, STRATA).prefill[0] == (0, (), 1_000, end)
