"""The checks have to catch what they are for: a policy of each kind of fault."""

import dataclasses
import itertools

import pytest

from strata_jax import recording, testing
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import policy_config, schedule
from strata_jax.scheduler.views import Load, Prefill, StepPlan
from tests.scheduler.build import budgets, decodes, view, waits


def test_a_policy_that_remembers_is_not_pure():
  calls = itertools.count()

  def remembers(one, config):
    return dataclasses.replace(schedule(one, config), wake_at_s=float(next(calls) // 50))

  with pytest.raises(AssertionError, match="another plan for view"):
    testing.check_policy(remembers)


def test_a_policy_that_looks_at_identities_is_not_pure():
  def by_identity(one, config):
    plan = schedule(one, config)
    return plan if id(one) in known else dataclasses.replace(plan, wake_at_s=1.0)

  one = view(waits(0))
  known = {id(one)}
  with pytest.raises(AssertionError, match="given an equal view"):
    testing.check_pure(lambda it: by_identity(it, SchedulerConfig()), [one])


def test_a_policy_that_writes_into_a_view():
  def writes(one, config):
    one.in_flight.clear()
    return schedule(one, config)

  one = view(waits(0), in_flight={1: (0, 5)})
  with pytest.raises(AssertionError, match="changed view"):
    testing.check_pure(lambda it: writes(it, SchedulerConfig()), [one])


def test_a_policy_that_starves():
  def ignores_the_config(one, config):
    return schedule(one, policy_config("strata_paper"))

  with pytest.raises(AssertionError, match="passed over in 17 rounds, expected at most 16"):
    testing.check_policy(ignores_the_config)


def test_a_policy_that_forgets_somebody():
  def forgets(one, config):
    kept = tuple(r for r in one.waiting if r.request_id != 3)
    return schedule(dataclasses.replace(one, waiting=kept), config)

  with pytest.raises(AssertionError, match="are left after"):
    testing.check_policy(forgets)


def test_golden_views(tmp_path):
  path = tmp_path / "golden.jsonl"
  one = view(waits(0, (1, 200, "in_queue")), waits(1, (1, 200, "in_queue")))
  config = SchedulerConfig()
  with recording.Recorder(path, policy="", config=config) as recorder:
    recorder(one, schedule(one, config))
  testing.check_golden(lambda it: schedule(it, config), path)
  with pytest.raises(AssertionError, match="deferred:"):
    testing.check_golden(lambda it: schedule(it, policy_config("fcfs")), path)


ONE = view(
  waits(0, (1, 32, "host"), (2, 32, "in_queue"), tail=3),
  waits(1, (1, 32, "host"), tail=3),
  running=(decodes(9),),
  budgets=budgets(page_size=16, step_tokens=48, batch_requests=2, running_requests=3),
)
GOOD = Prefill(0, (Load(1, 32),), 32, 67)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"version": 2}, "expected version 1"),
    ({"prefill": (GOOD,), "postponed": (0,)}, "several"),
    ({"prefill": (Prefill(5, (), 0, 5),)}, "prefill: requests"),
    ({"decode": (0,)}, "decode: requests"),
    ({"park": (0,)}, "park: requests"),
    ({"resume": (9,)}, "resume: requests"),
    ({"prefill": (Prefill(0, (), 32, 67),)}, "node 1 is not loaded"),
    ({"prefill": (Prefill(0, (Load(1, 16),), 32, 67),)}, "node 1 is not loaded"),
    ({"prefill": (Prefill(0, (Load(1, 8),), 8, 67),)}, "a part of a page"),
    ({"prefill": (Prefill(0, (Load(2, 32),), 0, 48),)}, "does not read"),
    ({"prefill": (Prefill(0, (Load(1, 32),), 64, 67),)}, "in_queue"),
    ({"prefill": (GOOD, Prefill(1, (Load(1, 32),), 32, 35))}, "loaded twice"),
    ({"prefill": (Prefill(0, (), 0, 40),)}, "ends within a page"),
    ({"prefill": (Prefill(0, (), 0, 68),)}, "of 67"),
    ({"prefill": (Prefill(0, (), 0, 67),)}, "67 tokens of 48"),
    ({"decode_steps": 2}, "2 decode steps"),
  ],
)
def test_plans_that_cannot_be_carried_out(changes, message):
  testing.check_plan(ONE, StepPlan(version=1, prefill=(GOOD,), decode=(9,)))
  plan = StepPlan(**{"version": 1, **changes})
  with pytest.raises(AssertionError, match=message):
    testing.check_plan(ONE, plan)


def test_plans_that_need_more_pages_than_there_are():
  plan = StepPlan(version=1, prefill=(GOOD,))
  testing.check_plan(dataclasses.replace(ONE, free_pages=5), plan)
  with pytest.raises(AssertionError, match="needs 5 pages of 4"):
    testing.check_plan(dataclasses.replace(ONE, free_pages=4), plan)
