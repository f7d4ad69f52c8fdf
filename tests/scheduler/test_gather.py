import dataclasses

import pytest

from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import schedule
from strata_jax.scheduler.views import Costs, ParkedView, RunningView
from tests.scheduler.build import admitted, budgets, decodes, prefills, view, waits

CONFIG = SchedulerConfig(gather_requests=3, gather_steps=4)
COSTS = Costs(load_s_per_token=5e-6, compute_s_per_token=2e-5, decode_step_s=6e-3)
HITS = tuple(waits(i, (i, 2_000, "device"), tail=40) for i in range(3))
PARKED = RunningView(
  request_id=7, phase="parked", arrival_s=0.0, context_tokens=2_000, remaining_prefill_tokens=40,
  load_tokens_left=0,
)  # fmt: skip


def _state(*waiting, decoded=(1, 9), running=(), parked=None, **more):
  decoding = [decodes(100 + i, decoded_steps=steps) for i, steps in enumerate(decoded)]
  more.setdefault("costs", COSTS)
  return view(*waiting, running=(*decoding, *running), parked=parked, **more)


def _plan(*waiting, config=CONFIG, **more):
  return schedule(_state(*waiting, **more), config)


def test_few_small_prefills_wait_for_others():
  plan = _plan(*HITS[:2])
  assert (admitted(plan), plan.decode, plan.bypassed) == ([], (100, 101), ())
  assert admitted(_plan(*HITS)) == [0, 1, 2]
  off = dataclasses.replace(CONFIG, gather_requests=1)
  assert admitted(_plan(*HITS[:2], config=off)) == [0, 1]


def test_they_wait_no_longer_than_so_many_decode_steps_after_the_last_prefill():
  assert admitted(_plan(HITS[0], decoded=(3, 9))) == []
  assert admitted(_plan(HITS[0], decoded=(4, 9))) == [0]
  assert admitted(_plan(HITS[0], decoded=())) == [0]  # nobody decodes meanwhile


def test_the_decode_steps_in_which_they_wait_come_under_one_plan():
  several = {"budgets": budgets(decode_steps=64)}
  assert _plan(HITS[0], **several).decode_steps == 3
  assert _plan(HITS[0], decoded=(2, 9), **several).decode_steps == 2
  assert _plan(decoded=(2, 9), **several).decode_steps == 2  # whoever comes would wait
  assert _plan(HITS[0]).decode_steps == 1
  loading = {"running": (PARKED._replace(load_tokens_left=900_000),),
             "parked": ParkedView((7,), 900_000, 40)}  # fmt: skip
  assert _plan(**loading, **several).decode_steps == 3
  assert _plan(**loading, **several, decoded=(4, 9)).decode_steps == 1


@pytest.mark.parametrize(("others", "resumed"), [(1, ()), (2, (7,))])
def test_those_whose_loads_have_come_are_counted_and_wait_too(others, resumed):
  # Another parked request still loads, so that they resume one by one.
  loads = PARKED._replace(request_id=8, load_tokens_left=900_000)
  plan = _plan(*HITS[:others], running=(PARKED, loads), parked=ParkedView((7, 8), 900_000, 80))
  assert (plan.resume, admitted(plan)) == (resumed, [0, 1] if resumed else [])


@pytest.mark.parametrize("least", [{"batch_requests": 3}, {"step_tokens": 90}])
def test_the_resumed_do_not_wait_where_others_took_their_room_among_the_parked(least):
  loads = PARKED._replace(request_id=8, load_tokens_left=20_000)
  joins = waits(5, (50, 40_000, "host"), tail=10)
  more = {"running": (PARKED, loads), "parked": ParkedView((7, 8), 20_000, 80)}
  plan = _plan(joins, **more, budgets=budgets(**least))
  assert (plan.park, plan.resume) == ((5,), ())
  ((name, value),) = least.items()
  plan = _plan(joins, **more, budgets=budgets(**{name: value - 1}))
  assert (plan.park, plan.resume) == ((5,), (7,))


def test_loads_begin_while_prefills_wait():
  loads = waits(5, (50, 40_000, "host"), tail=10)
  plan = _plan(HITS[0], loads, config=dataclasses.replace(CONFIG, max_bypasses=1))
  assert (admitted(plan), plan.park, plan.bypassed) == ([5], (5,), ())


def test_who_does_not_wait():
  urgent = waits(0, (1, 2_000, "device"), tail=40, bypasses=8)
  assert admitted(_plan(urgent)) == [0]
  assert admitted(_plan(waits(0, (1, 2_000, "device"), tail=400))) == [0]  # 8 ms of compute
  assert admitted(_plan(HITS[0], running=(prefills(9, 0, tail=40),))) == [9, 0]
  twins = [waits(i, (1, 2_000, "device"), (2, 120, "in_queue")) for i in range(2)]
  assert admitted(_plan(*twins)) == [0]  # the second waits for it
  assert admitted(_plan(HITS[0], costs=Costs())) == [0]  # unknown costs
