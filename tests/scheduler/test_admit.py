import dataclasses

import pytest

from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import POLICIES, policy_config, schedule
from tests.scheduler.build import admitted, budgets, decodes, view, waits

FCFS = policy_config("fcfs")
PAGES = budgets(page_size=16, step_tokens=64)


def _fits(one, pages, **changes):
  config = dataclasses.replace(FCFS, **changes)
  return [
    bool(schedule(dataclasses.replace(one, free_pages=free), config).prefill)
    for free in (pages - 1, pages)
  ] == [False, True]


def test_room_for_the_whole_prompt_and_its_output_at_the_first_chunk():
  one = view(waits(0, tail=1_000, output_reserve_tokens=9), budgets=PAGES)
  assert _fits(one, 64)  # 1,009 tokens
  assert schedule(one, FCFS).prefill == ((0, (), 0, 64),)


def test_loads_take_pages_device_hits_and_loading_nodes_do_not():
  path = ((1, 160, "device", True), (2, 32, "loading"), (3, 64, "host"), (4, 16, "in_queue"))
  assert _fits(view(waits(0, *path, tail=5), budgets=PAGES), 4 + 1 + 1)


def test_unlocked_device_hits_are_pinned_once():
  path = ((1, 160, "device"), (2, 80, "device", True))
  one = view(waits(0, *path, tail=16), waits(1, *path, tail=16), budgets=PAGES)
  for evictable, expected in ((10, []), (11, [0]), (12, [0, 1])):
    plan = schedule(dataclasses.replace(one, free_pages=0, evictable_pages=evictable), FCFS)
    assert admitted(plan) == expected


def test_budgets():
  many = [waits(i, tail=10) for i in range(9)]
  assert len(schedule(view(*many, budgets=budgets(batch_requests=4)), FCFS).prefill) == 4
  assert len(schedule(view(*many, budgets=budgets(running_requests=3)), FCFS).prefill) == 3
  running = tuple(decodes(90 + i) for i in range(3))
  few = budgets(running_requests=5)
  assert len(schedule(view(*many, running=running, budgets=few), FCFS).prefill) == 2
  plan = schedule(view(*many, budgets=budgets(step_tokens=25)), FCFS)
  assert [(e.compute_start, e.compute_end) for e in plan.prefill] == [(0, 10), (0, 10), (0, 5)]


@pytest.mark.parametrize("tokens", [15, 16, 33])
def test_chunks_end_at_pages(tokens):
  one = view(waits(0, tail=100), budgets=budgets(page_size=16, step_tokens=tokens))
  ends = [entry.compute_end for entry in schedule(one, FCFS).prefill]
  assert ends == ([tokens - tokens % 16] if tokens >= 16 else [])


def test_room_for_running_outputs_is_kept():
  running = (decodes(9, output_tokens_left=100),)
  one = view(waits(0, tail=16), running=running, budgets=PAGES)
  assert _fits(one, 1 + 7)
  assert _fits(one, 1 + 2, running_reserve_tokens=32)
  assert _fits(one, 1, running_reserve_tokens=0)


@pytest.mark.parametrize("name", POLICIES)
def test_case_29_small_requests_run_beside_one_that_has_no_room_yet(name):
  queue = (waits(0, tail=1_000), waits(1, tail=10), waits(2, tail=10))
  running = (decodes(9, output_tokens_left=0),)
  plan = schedule(
    view(*queue, running=running, free_pages=50, capacity_pages=2_000), policy_config(name)
  )
  assert sorted(admitted(plan)) == [1, 2]
  assert plan.bypassed == (0,)


def test_refused_says_why():
  (refused,) = schedule(view(waits(0, tail=170), budgets=PAGES, capacity_pages=10), FCFS).refused
  assert refused == (0, "needs 11 device pages of 10")


def test_min_load_tokens_is_a_switch():
  one = view(waits(0, (1, 9, "host"), tail=3))
  assert schedule(one, SchedulerConfig()).prefill == ((0, ((1, 9),), 9, 12),)
  assert schedule(one, SchedulerConfig(min_load_tokens=10)).prefill == ((0, (), 0, 12),)
