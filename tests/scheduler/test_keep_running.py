import dataclasses

from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import policy_config, schedule
from strata_jax.scheduler.views import RunningView
from tests.scheduler.build import admitted, budgets, decodes, prefills, view, waits

STRATA = SchedulerConfig()
FCFS = policy_config("fcfs")


def test_decodes_run_beside_prefills():
  one = view(waits(5, tail=10), running=(decodes(0), prefills(1, 64, tail=20), decodes(2)))
  plan = schedule(one, FCFS)
  assert plan.prefill == ((1, (), 64, 84), (5, (), 0, 10))
  assert (plan.decode, plan.decode_steps) == ((0, 2), 1)


def test_prompts_under_way_come_first_in_admission_order():
  running = (prefills(1, 64, tail=60), prefills(2, 0, tail=60), prefills(3, 0, tail=60))
  plan = schedule(view(waits(5, tail=10), running=running, budgets=budgets(step_tokens=100)), FCFS)
  assert plan.prefill == ((1, (), 64, 124), (2, (), 0, 40))
  plan = schedule(view(waits(5), running=running, budgets=budgets(batch_requests=1)), FCFS)
  assert plan.prefill == ((1, (), 64, 124),)


def test_the_youngest_are_preempted_until_the_others_pages_fit():
  running = tuple(decodes(i, next_pages=1, held_pages=0) for i in range(4))
  plan = schedule(view(waits(7), running=running, free_pages=2), FCFS)
  assert (plan.preempt, plan.decode, plan.prefill) == ((3, 2), (0, 1), ())
  running = (*running[:3], decodes(3, held_pages=2))
  plan = schedule(view(running=running, free_pages=1), FCFS)
  assert (plan.preempt, plan.decode) == ((3,), (0, 1, 2))


def test_prefills_may_be_preempted_parked_and_oldest_not():
  parked = RunningView(request_id=2, phase="parked", arrival_s=0.0, context_tokens=5, held_pages=9)
  running = (decodes(0, next_pages=1), prefills(1, 64, tail=8, held_pages=3), parked)
  plan = schedule(view(running=running, free_pages=0), STRATA)
  assert (plan.preempt, plan.decode, plan.prefill) == ((1,), (0,), ())
  plan = schedule(view(running=(running[0], parked), free_pages=0), STRATA)
  assert (plan.preempt, plan.decode) == ((), ())  # waits for the parked one to go on


def test_several_decode_steps_when_nothing_else_happens():
  few = budgets(page_size=16, decode_steps=8)
  one = view(running=(decodes(0, 110), decodes(1, 64, next_pages=1)), budgets=few, free_pages=2)
  assert schedule(one, STRATA).decode_steps == 8
  assert schedule(dataclasses.replace(one, free_pages=1), STRATA).decode_steps == 2
  short = (decodes(0, 110, output_tokens_left=3), decodes(1, 64, next_pages=1))
  assert schedule(dataclasses.replace(one, running=short), STRATA).decode_steps == 3
  busy = dataclasses.replace(one, waiting=(waits(5),), free_pages=100)
  assert schedule(busy, STRATA).decode_steps == 1
  full = dataclasses.replace(busy, budgets=budgets(running_requests=2, decode_steps=8))
  assert schedule(full, STRATA).decode_steps == 8


def test_no_more_tokens_go_back_than_the_prompt_has_left():
  running = prefills(0, 1_000, (2, 2_500, "in_flight"))
  hit = waits(1, (1, 1_000, "device", True), tail=3_000, front=True)
  one = view(hit, running=(running,), budgets=budgets(step_tokens=4_000), free_pages=99)
  assert schedule(one, STRATA).prefill == ((0, (), 1_000, 1_000 + 2_501),)


def test_kept_tokens_go_back_to_the_prompt_under_way():
  """The released request does not fit after all."""
  running = prefills(0, 1_000, (2, 9_000, "in_flight"))
  hit = waits(1, (1, 1_000, "device", True), tail=100, front=True)
  one = view(hit, running=(running,), budgets=budgets(step_tokens=4_000), free_pages=99)
  assert schedule(one, STRATA).prefill == ((0, (), 1_000, 5_000),)
  assert admitted(schedule(dataclasses.replace(one, free_pages=100), STRATA)) == [0, 1]
