"""Who hits pages that a parked request loads: joins the parked, or is admitted into this step."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import POLICIES, policy_config, schedule
from strata_jax.scheduler.views import Costs, ParkedView, RunningView
from tests.scheduler import test_policies
from tests.scheduler.build import admitted, budgets, decodes, view, waits

JOINS = SchedulerConfig(join_loading=True)
APART = SchedulerConfig(join_loading=False)
LEFT = 40_000
LOADS = (1, 50_000, "loading")


def _parked(request_id, left):
  return RunningView(
    request_id=request_id, phase="parked", arrival_s=0.0, context_tokens=50_000,
    remaining_prefill_tokens=10, load_tokens_left=left,
  )  # fmt: skip


def _beside(*waiting, parked=(LEFT,), **more):
  """A view with parked requests, so many tokens of their loads left each, and one that decodes."""
  running = tuple(_parked(i, left) for i, left in enumerate(parked))
  return view(
    *waiting, running=(*running, decodes(9)), loading={1: LEFT},
    parked=ParkedView(tuple(range(len(parked))), max(parked), 10 * len(parked)), **more,
  )  # fmt: skip


def test_who_hits_pages_on_the_way_joins_the_parked():
  one = _beside(waits(20, LOADS, tail=10), waits(21, (2, 30, "device"), tail=10))
  for config, parks in ((JOINS, (20,)), (APART, ())):
    plan = schedule(one, config)
    assert plan.prefill[0] == (20, (), 50_000, 50_010)
    assert (admitted(plan), plan.park, plan.resume) == ([20, 21], parks, ())


def test_it_resumes_when_what_it_hits_has_come():
  for left, resumed in ((0, (0, 1)), (1, (0,))):
    one = _beside(parked=(0, left, LEFT))
    assert schedule(one, JOINS).resume == resumed
  plan = schedule(_beside(waits(20, LOADS), parked=(0, 0)), JOINS)
  assert (plan.resume, admitted(plan), plan.park) == ((0, 1), [20], (20,))


@pytest.mark.parametrize(
  ("path", "start", "joins"),
  [
    ((("device", 300), ("loading", 500)), 800, True),
    ((("loading", 500), ("in_queue", 300)), 500, True),
    ((("in_queue", 300), ("loading", 500)), 0, False),  # computes all of it
    ((("loading", 500), ("host", 40)), 500, True),  # 40 are too few to load
    ((("host", 40), ("loading", 500)), 0, False),  # and with them the rest
    ((("device", 300), ("host", 40), ("loading", 500)), 300, False),
  ],
)
def test_only_pages_before_its_compute_count(path, start, joins):
  spans = tuple((i, tokens, state) for i, (state, tokens) in enumerate(path, start=1))
  one = _beside(waits(20, *spans, tail=10))
  config = dataclasses.replace(JOINS, min_load_tokens=41)
  plan = schedule(one, config)
  assert plan.park == ((20,) if joins else ())
  assert plan.prefill[0][:3] == (20, (), start)
  assert schedule(one, dataclasses.replace(config, join_loading=False)).park == ()


@pytest.mark.parametrize("config", [JOINS, APART])
@pytest.mark.parametrize("states", [("host", "loading"), ("loading", "host")])
def test_who_loads_as_well_joins_anyway(config, states):
  spans = tuple((i, 400, state) for i, state in enumerate(states, start=1))
  loads = ((1 + states.index("host"), 400),)
  plan = schedule(_beside(waits(20, *spans, tail=10)), config)
  assert plan.prefill == ((20, loads, 800, 810),)
  assert plan.park == (20,)


def test_a_full_window_keeps_out_loads_but_not_who_joins():
  costs = Costs(load_s_per_token=1e-5)  # 0.2 s are 20,000 tokens
  one = _beside(waits(20, (2, 400, "host")), waits(21, LOADS), costs=costs)
  plan = schedule(one, JOINS)
  assert (admitted(plan), plan.park, plan.bypassed) == ([21], (21,), ())
  few = dataclasses.replace(one, budgets=budgets(batch_requests=1))
  assert admitted(schedule(few, JOINS)) == []  # as many are parked as may be
  assert admitted(schedule(few, APART)) == [21]


def test_a_parked_batch_is_joined_by_nobody():
  one = _beside(waits(20, LOADS), waits(21, tail=10))
  for config, expected in ((JOINS, [21]), (APART, [20, 21])):
    plan = schedule(one, dataclasses.replace(config, rolling_loads=False))
    assert (admitted(plan), plan.park) == (expected, ())


def test_with_nobody_parked_it_computes_unless_its_batch_is_parked():
  """What is loading belongs to a step that waits for it."""
  hit, heavy = waits(20, LOADS, tail=10), waits(21, (2, 50_000, "host"), tail=10)
  for config, parks in ((JOINS, (20, 21)), (APART, (21,))):
    alone = schedule(view(hit, running=(decodes(9),), loading={1: LEFT}), config)
    assert (admitted(alone), alone.park) == ([20], ())
    both = schedule(view(hit, heavy, running=(decodes(9),), loading={1: LEFT}), config)
    assert (admitted(both), both.park) == ([20, 21], parks)


def _loads_nothing(one):
  requests = (*one.waiting, *one.running)
  return not any(span.state == "loading" for request in requests for span in request.path)


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000), order=st.sampled_from(["fcfs", "most_shared"]))
def test_nothing_changes_while_nothing_that_is_wanted_loads(name, seed, order):
  config = dataclasses.replace(policy_config(name), order=order, ratio_threshold=2.0)
  joins, apart = (dataclasses.replace(config, join_loading=on) for on in (True, False))
  seen = test_policies.random_views(seed, lambda one: schedule(one, joins))
  same = [one for one in seen if _loads_nothing(one)]
  assert len(same) > len(seen) / 4
  for one in same:
    assert schedule(one, joins) == schedule(one, apart)
