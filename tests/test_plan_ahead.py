"""Plans that are made while a step runs, and what the controller foresees of its end."""

import dataclasses

import numpy as np
import pytest

from strata_jax import serving_loop
from strata_jax.cache_controller import CacheController
from strata_jax.config import CacheConfig, ServingConfig
from strata_jax.executors.protocol import SpillDone, StepDone
from strata_jax.scheduler.policies import make_policy
from strata_jax.scheduler.views import StepPlan
from strata_jax.workloads.request import Request
from tests.controller_harness import Harness, tokens
from tests.page_checking_executor import VOCABULARY, PageCheckingExecutor, continuation

CACHE = CacheConfig(page_size=4, device_tokens=256, host_tokens=512)
AHEAD = ServingConfig(
  requests_in_flight=4, running_requests=4, batch_requests=4, step_tokens=64, plan_ahead=True
)


def _request(request_id, prompt, **fields):
  return Request(request_id=request_id, prompt_ids=np.asarray(prompt, np.int32), **fields)


def _mixed(count, **fields):
  """Requests about three documents, in random order."""
  rng = np.random.default_rng(0)
  texts = rng.integers(0, VOCABULARY, (3, 40), dtype=np.int32)
  return [
    _request(
      i,
      [*texts[rng.integers(3)], *rng.integers(0, VOCABULARY, rng.integers(1, 9))],
      max_new_tokens=int(rng.integers(1, 8)),
      **fields,
    )
    for i in range(count)
  ]


class _Busy(PageCheckingExecutor):
  """Says whether a step is under way, and of each plan when it was made."""

  def __init__(self, policy, cache):
    super().__init__(cache)
    self.policy = make_policy(policy) if isinstance(policy, str) else policy
    self.planned_busy = []  # of each plan for somebody: while a step was under way

  def plan(self, view):
    if view.waiting or view.running:
      self.planned_busy.append(self._busy)
    return self.policy(view)


def _serve(requests, serving=AHEAD, policy="strata", cache=CACHE):
  executor = _Busy(policy, cache)
  for request in requests:
    executor.expect(request.request_id, request.prompt_ids)
  controller = CacheController(cache, serving)
  result = serving_loop.serve(
    requests, controller=controller, policy=executor.plan, executor=executor, serving=serving
  )
  controller.check()
  assert not executor.registered
  return result, executor


def test_steps_follow_each_other_without_a_plan_in_between():
  requests = _mixed(30)
  result, executor = _serve(requests)
  for request, record in zip(requests, result.requests, strict=True):
    assert record.output_ids == continuation(request.prompt_ids, request.max_new_tokens)
  assert executor.planned_busy.count(False) == 1
  _, later = _serve(requests, dataclasses.replace(AHEAD, plan_ahead=False))
  assert not any(later.planned_busy)


def test_plans_are_the_same_with_and_without():
  requests = _mixed(30, arrival_s=0.0)
  serving = dataclasses.replace(AHEAD, requests_in_flight=30)
  ahead, _ = _serve(requests, serving)
  after, _ = _serve(requests, dataclasses.replace(serving, plan_ahead=False))
  assert ahead.steps == after.steps
  assert [r.row() for r in ahead.requests] == [r.row() for r in after.requests]


def test_an_arrival_during_a_step_is_in_the_next_plan():
  first = _request(0, range(64), max_new_tokens=1, arrival_s=0.0)  # 6.4 ms
  second = _request(1, range(64, 90), max_new_tokens=1, arrival_s=0.003)
  result, executor = _serve([first, second])
  assert result.requests[1].admitted_s == result.steps[0].ended_s
  assert executor.planned_busy == [False, True]


def test_who_gets_the_last_token_makes_room_while_the_step_runs():
  requests = [_request(i, range(9 * i, 9 * i + 8), max_new_tokens=2) for i in range(6)]
  serving = dataclasses.replace(AHEAD, requests_in_flight=2)
  result, executor = _serve(requests, serving)
  assert all(executor.planned_busy[1:])
  for r in result.requests:
    assert sum(o.admitted_s <= r.admitted_s < o.over_s for o in result.requests) <= 2
  starts = {step.started_s for step in result.steps}
  for r in result.requests[2:]:
    assert r.dispatched_s in starts  # of the step that made room
    assert r.admitted_s in {o.over_s for o in result.requests}


def test_giving_up_during_the_last_step_is_no_output():
  one = _request(0, range(64), max_new_tokens=1, arrival_s=0.0, abort_s=0.003)
  two = _request(1, range(70), max_new_tokens=2, arrival_s=0.0)
  result, _ = _serve([one, two], dataclasses.replace(AHEAD, requests_in_flight=1))
  assert [r.outcome for r in result.requests] == ["aborted", "finished"]
  assert result.requests[0].output_ids == []
  assert result.requests[1].output_ids == continuation(two.prompt_ids, 2)


def test_a_plan_that_a_stop_token_overtakes_is_not_carried_out():
  prompt = np.arange(10, dtype=np.int32)
  outputs = continuation(prompt, 8)
  stops = _request(0, prompt, max_new_tokens=8, stop_token_ids=(outputs[3],))
  goes_on = _request(1, prompt + 20, max_new_tokens=8)
  result, executor = _serve([stops, goes_on])
  end = outputs.index(outputs[3])
  assert result.requests[0].output_ids == outputs[:end]
  assert result.requests[1].output_ids == continuation(goes_on.prompt_ids, 8)
  assert executor.planned_busy.count(False) == 2  # the first plan, and the one behind the stop


def test_a_time_to_wake_up_that_comes_during_the_step_is_not_missed():
  real = make_policy("fcfs")

  def late(view):
    waiting = tuple(r for r in view.waiting if r.request_id == 0 or view.now_s >= 0.005)
    plan = real(dataclasses.replace(view, waiting=waiting))
    return plan if waiting == view.waiting else dataclasses.replace(plan, wake_at_s=0.005)

  first = _request(0, range(64), max_new_tokens=1, arrival_s=0.0)  # 6.4 ms
  second = _request(1, range(64, 90), max_new_tokens=1, arrival_s=0.003)
  cache = dataclasses.replace(CACHE, host_tokens=0)  # no backup ends later
  result, _ = _serve([first, second], policy=late, cache=cache)
  assert [r.outcome for r in result.requests] == ["finished", "finished"]
  assert result.requests[1].admitted_s == result.steps[0].ended_s


def test_the_controller_foresees_all_but_the_tokens():
  h = Harness(page_size=2, decode_steps=4)
  controller = h.controller
  assert controller.foresee() is None  # nothing is under way
  request = h.add(tokens((0, 5)), outputs=9)
  h.prefill(request)
  assert controller.foresee() == (request,)
  assert controller.foresee() is None
  view = h.view()
  assert [(r.phase, r.context_tokens, r.output_tokens_left) for r in view.running] == [
    ("decode", 5, 8)
  ]
  with pytest.raises(RuntimeError, match="under way"):
    controller.apply(StepPlan(version=view.version), 0.0)
  h.step_done()
  h.apply(decode=(request,))
  assert h.step.decodes[0].token_id == h.contexts[request][-1]
  h.step_done()
  h.view()
  h.apply(decode=(request,), decode_steps=4)
  assert controller.foresee() is None  # the tokens in between are published, and not known


def test_a_foreseen_step_must_bring_its_tokens():
  h = Harness(page_size=2)
  h.prefill(h.add(tokens((0, 5)), outputs=9))
  h.controller.foresee()
  with pytest.raises(ValueError, match="expected one token of request 0"):
    h.controller.complete(StepDone(step_id=0, started_s=0.0, at_s=0.0, tokens={}), 0.0)


def test_a_spill_that_ends_during_a_step_renews_the_plan(monkeypatch):
  """No spill starts a step, but views say what storage has."""
  take_in = serving_loop._Run._event
  monkeypatch.setattr(
    serving_loop._Run,
    "_event",
    lambda run, event: None if isinstance(event, SpillDone) else take_in(run, event),
  )
  plans = []  # made when a spill ended, and when that was taken in

  class Spilling(_Busy):
    def wait(self, until_s):
      if len(plans) == 1:
        plans.append(len(self.planned_busy))
      if not plans and self._busy and self.planned_busy[-1]:
        plans.append(len(self.planned_busy))
        return [SpillDone(0, self.now_s(), True)]
      return super().wait(until_s)

  monkeypatch.setitem(globals(), "_Busy", Spilling)
  _serve(_mixed(5))
  assert plans[1] == plans[0] + 1
