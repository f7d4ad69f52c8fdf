"""The loop with the real controller and policies; the executor checks the tokens of every page."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax import metrics, serving_loop
from strata_jax.cache_controller import CacheController
from strata_jax.config import CacheConfig, ServingConfig
from strata_jax.executors.protocol import StepDone
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import make_policy
from strata_jax.scheduler.views import Deferred, Prefill, Refused, StepPlan
from strata_jax.workloads.request import Request
from tests.page_checking_executor import VOCABULARY, PageCheckingExecutor, continuation

CACHE = CacheConfig(page_size=4, device_tokens=256, host_tokens=512)
SERVING = ServingConfig(requests_in_flight=8, running_requests=8, batch_requests=8, step_tokens=64)


def _tokens(count, seed=0):
  return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.int32)


def _request(request_id, prompt, **fields):
  fields = {"max_new_tokens": 3} | fields
  return Request(request_id=request_id, prompt_ids=np.asarray(prompt, np.int32), **fields)


class _Run:
  """One run to its end, with everything that can be looked at afterwards."""

  def __init__(
    self,
    requests,
    *,
    cache=CACHE,
    serving=SERVING,
    policy="strata",
    seed=0,
    context_tokens=None,
    controller=None,
    **hooks,
  ):
    self.executor = PageCheckingExecutor(cache, seed=seed)
    for request in requests:
      self.executor.expect(request.request_id, request.prompt_ids)
    self.controller = controller or CacheController(cache, serving, context_tokens=context_tokens)
    self.result = serving_loop.serve(
      requests,
      controller=self.controller,
      policy=make_policy(policy) if isinstance(policy, str) else policy,
      executor=self.executor,
      serving=serving,
      **hooks,
    )
    self.records = self.result.requests
    self._check_rest()

  def _check_rest(self):
    """What holds after every run: nothing is held, nothing was lost."""
    self.controller.check()
    view = self.controller.view(self.executor.now_s())
    assert not view.waiting
    assert not view.running
    assert view.free_pages + view.evictable_pages == view.capacity_pages
    assert not self.executor.registered
    for r in self.records:
      assert r.outcome in ("finished", "aborted", "refused")
      if r.outcome == "finished":
        assert r.late_hit_tokens >= 0
        assert r.arrival_s <= r.dispatched_s <= r.admitted_s <= r.first_token_s <= r.over_s
    assert sum(r.computed_tokens for r in self.records) == sum(
      step.prefill_tokens for step in self.result.steps
    )

  def check_outputs(self, requests):
    for request, record in zip(requests, self.records, strict=True):
      assert record.outcome == "finished"
      expected = continuation(request.prompt_ids, request.max_new_tokens)
      assert record.output_ids == expected
    assert self.result.deadlocks == 0


def _hits(record):
  return record.device_hit_tokens + record.host_hit_tokens


def _mixed(count, *, seed=0, documents=4, document_tokens=40, **fields):
  """Requests about a few documents, in random order."""
  rng = np.random.default_rng(seed)
  texts = [_tokens(document_tokens, seed=100 + i) for i in range(documents)]
  return [
    _request(
      i,
      np.concatenate([texts[rng.integers(documents)], _tokens(rng.integers(1, 9), seed=1000 + i)]),
      max_new_tokens=int(rng.integers(1, 8)),
      **fields,
    )
    for i in range(count)
  ]


@pytest.mark.parametrize("policy", ["strata", "fcfs", "longest_prefix"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_outputs_are_those_without_a_cache(policy, page_size):
  requests = _mixed(40)
  cache = dataclasses.replace(CACHE, page_size=page_size)
  run = _Run(requests, cache=cache, policy=policy)
  run.check_outputs(requests)
  off = _Run(requests, cache=dataclasses.replace(cache, enabled=False), policy=policy)
  off.check_outputs(requests)
  assert sum(_hits(r) for r in run.records) > 0
  assert run.executor.computed_tokens < off.executor.computed_tokens
  # Without a cache every total is 0 and everything is computed (case 10).
  assert all(_hits(r) + r.late_hit_tokens + r.loaded_tokens == 0 for r in off.records)
  assert all(r.computed_tokens == r.prompt_tokens for r in off.records)


def test_the_host_tier_gives_back_what_the_device_had_no_room_for():
  requests = _mixed(40, documents=8)
  cache = dataclasses.replace(CACHE, device_tokens=128)
  run = _Run(requests, cache=cache, serving=dataclasses.replace(SERVING, requests_in_flight=2))
  run.check_outputs(requests)
  assert sum(r.host_hit_tokens for r in run.records) > 100
  assert sum(step.load_tokens for step in run.result.steps) == run.controller.stats.loaded_tokens
  backed_up = sum(step.backup_tokens for step in run.result.steps)
  assert backed_up == run.controller.stats.backed_up_tokens > 0
  assert run.result.load_busy_s > 0
  assert any(r.load_s > 0 for r in run.records)


def test_backups_do_not_wait_for_the_next_step():
  """A request ends and nobody waits; who comes later pushes its pages out of the device."""
  document = _tokens(120)
  prompts = ([*document, 1], _tokens(120, seed=1), [*document, 2])
  requests = [
    _request(i, prompt, arrival_s=5.0 * i, max_new_tokens=1) for i, prompt in enumerate(prompts)
  ]
  run = _Run(requests, cache=dataclasses.replace(CACHE, device_tokens=128))
  run.check_outputs(requests)
  assert run.records[2].host_hit_tokens > 100


@pytest.mark.parametrize("bundles", [True, False])
def test_records_say_who_was_a_bundle_hit(bundles):
  document = _tokens(120)
  prompts = ([*document, 1], _tokens(120, seed=1), [*document, 2], [*document, 3])
  requests = [_request(i, prompt, arrival_s=5.0 * min(i, 2)) for i, prompt in enumerate(prompts)]
  policy = make_policy("strata", SchedulerConfig(bundles=bundles))
  run = _Run(requests, cache=dataclasses.replace(CACHE, device_tokens=160), policy=policy)
  run.check_outputs(requests)
  hits = run.records[3].host_hit_tokens
  assert hits == run.records[2].host_hit_tokens == sum(r.loaded_tokens for r in run.records) > 0
  assert [r.bundle_hit_tokens for r in run.records] == [0, 0, 0, hits if bundles else 0]


def test_parked_loads_are_covered_by_decode_steps():
  requests = [dataclasses.replace(r, max_new_tokens=12) for r in _mixed(60, documents=8)]
  cache = dataclasses.replace(CACHE, device_tokens=160)
  config = SchedulerConfig(ratio_threshold=1.0)
  run = _Run(requests, cache=cache, policy=make_policy("strata", config))
  run.check_outputs(requests)
  assert sum(step.parked for step in run.result.steps) > 0
  assert run.result.bubble_s > 0
  summary = metrics.summarize(run.result)
  assert 0 < summary["bubble_fraction"] < 1
  assert 0 <= summary["stall_fraction"] < 1


@pytest.mark.parametrize("changes", [{}, {"rolling_loads": False}, {"max_bypasses": 1}], ids=str)
def test_case_29_parked_loads_beyond_the_pool_make_progress(changes):
  """Two documents of 40 pages each on the host, asked about at once beside a long decode."""
  documents = [_tokens(160, seed=i) for i in range(2)]
  warm = [_request(i, [*document, 1]) for i, document in enumerate(documents)]
  talk = [_request(2, _tokens(9, seed=2), max_new_tokens=60)]
  asked = [
    _request(3 + i, [*documents[i % 2], 2 + i], arrival_s=5.0) for i in range(6)
  ]  # fmt: skip
  talk[0] = dataclasses.replace(talk[0], arrival_s=4.99)
  requests = [*warm, *talk, *asked]
  cache = dataclasses.replace(CACHE, device_tokens=240)
  config = SchedulerConfig(ratio_threshold=1.0, **changes)
  run = _Run(requests, cache=cache, policy=make_policy("strata", config))
  run.check_outputs(requests)
  assert sum(step.parked for step in run.result.steps) >= 2
  assert all(r.host_hit_tokens >= 160 - 4 or r.device_hit_tokens for r in run.records[3:])


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
def test_every_write_policy_gives_the_same_outputs(write_policy):
  requests = _mixed(40, documents=8)
  cache = dataclasses.replace(CACHE, device_tokens=128, write_policy=write_policy)
  run = _Run(requests, cache=cache)
  run.check_outputs(requests)
  assert sum(r.host_hit_tokens for r in run.records) > 0


def test_case_7_one_token_is_always_computed():
  prompt = _tokens(48)
  longer = np.concatenate([prompt, _tokens(16, seed=1)])
  requests = [_request(i, prompt) for i in range(3)] + [_request(3, longer)]
  run = _Run(
    requests,
    cache=dataclasses.replace(CACHE, page_size=16),
    serving=dataclasses.replace(SERVING, requests_in_flight=1),
  )
  run.check_outputs(requests)
  assert [r.device_hit_tokens for r in run.records] == [0, 32, 32, 48]
  assert [r.computed_tokens for r in run.records] == [48, 16, 16, 16]


def test_case_8_pages_filled_by_decode_are_found_again():
  first = _request(0, _tokens(12), max_new_tokens=8)
  outputs = continuation(first.prompt_ids, 8)
  follow = _request(1, [*first.prompt_ids, *outputs, 5], follows=0)
  run = _Run([first, follow])
  run.check_outputs([first, follow])
  # The KV of the last output was never computed: 19 tokens, 4 whole pages.
  assert run.records[1].device_hit_tokens == 16


def test_case_17_what_does_not_fit_is_refused_and_blocks_nobody():
  requests = [_request(0, _tokens(300)), _request(1, _tokens(20, seed=1))]
  run = _Run(requests)
  assert [r.outcome for r in run.records] == ["refused", "finished"]
  assert run.records[0].reason
  assert run.records[0].row()["ttft_s"] is None


def test_a_policy_may_refuse_and_says_why():
  real = make_policy("fcfs")

  def policy(view):
    if view.waiting and view.waiting[0].request_id == 0:
      return StepPlan(version=view.version, refused=(Refused(0, "not today"),))
    return real(view)

  run = _Run([_request(0, _tokens(10)), _request(1, _tokens(20, seed=1))], policy=policy)
  assert [(r.outcome, r.reason) for r in run.records] == [
    ("refused", "not today"), ("finished", "length"),
  ]  # fmt: skip


@pytest.mark.parametrize("policy", ["strata", "fcfs", "dedup"])
def test_case_17_a_request_that_just_fits_is_served(policy):
  # 253 + 4 tokens with KV of all but the last: 64 pages.
  requests = [_request(0, _tokens(253), max_new_tokens=4), _request(1, _tokens(20, seed=1))]
  _Run(requests, policy=policy).check_outputs(requests)


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_case_28_aborts_at_random_moments_leave_nothing_behind(plan_ahead):
  rng = np.random.default_rng(0)
  requests = [
    dataclasses.replace(
      request,
      arrival_s=float(rng.uniform(0, 4)),
      abort_s=float(rng.exponential(0.05)) if i % 5 else None,
    )
    for i, request in enumerate(_mixed(1250, documents=12))
  ]
  cache = dataclasses.replace(CACHE, device_tokens=160)
  serving = dataclasses.replace(SERVING, requests_in_flight=32, plan_ahead=plan_ahead)
  run = _Run(requests, cache=cache, serving=serving)
  outcomes = [r.outcome for r in run.records]
  assert outcomes.count("aborted") > 500
  assert run.result.deadlocks == 0
  phases = {
    "client": sum(r.outcome == "aborted" and r.dispatched_s is None for r in run.records),
    "queue": sum(
      r.outcome == "aborted" and r.dispatched_s is not None and r.admitted_s is None
      for r in run.records
    ),
    "prefill": sum(
      r.outcome == "aborted" and r.admitted_s is not None and r.first_token_s is None
      for r in run.records
    ),
    "decode": sum(r.outcome == "aborted" and r.first_token_s is not None for r in run.records),
  }
  assert min(phases.values()) > 0, phases
  for request, record in zip(requests, run.records, strict=True):
    if record.outcome == "finished":
      expected = continuation(request.prompt_ids, request.max_new_tokens)
      assert record.output_ids == expected
  run.controller.reset()
  view = run.controller.view(0.0)
  assert view.free_pages == view.capacity_pages


@pytest.mark.parametrize("step_tokens", range(1, 24))
def test_case_30_a_prompt_in_chunks_gives_the_same_output(step_tokens):
  requests = [_request(0, _tokens(23))]
  run = _Run(
    requests,
    cache=dataclasses.replace(CACHE, page_size=1),
    serving=dataclasses.replace(SERVING, step_tokens=step_tokens),
  )
  run.check_outputs(requests)
  assert run.executor.computed_tokens == 23
  assert sum(step.prefill_tokens > 0 for step in run.result.steps) == -(-23 // step_tokens)


def _one_chunk_in_turn(view):
  """A policy: a chunk of 16 tokens of whoever got least far, else decode."""
  reach = {}
  for request in (*view.waiting, *view.running):
    if getattr(request, "phase", "prefill") == "prefill":
      start = getattr(request, "context_tokens", 0)
      end = start + sum(span.tokens for span in request.path) + request.tail_tokens
      for span in request.path:
        if span.state != "device":
          break
        start += span.tokens
      reach[request.request_id] = start, end
  if not reach:
    decode = tuple(running.request_id for running in view.running)
    return StepPlan(version=view.version, decode=decode)
  request_id = min(reach, key=lambda i: reach[i])
  start, end = reach[request_id]
  chunk = Prefill(request_id, (), start, min(start + 16, end))
  return StepPlan(version=view.version, prefill=(chunk,))


def test_case_31_every_chunk_consults_the_cache():
  requests = [_request(i, _tokens(128)) for i in range(2)]
  run = _Run(requests, policy=_one_chunk_in_turn)
  run.check_outputs(requests)
  first, second = run.records
  # Of the 124 tokens that can be shared each is computed once, the last 4 by both.
  assert first.computed_tokens + second.computed_tokens == 124 + 2 * 4
  assert first.device_hit_tokens == 0
  assert first.late_hit_tokens > 0
  assert second.late_hit_tokens > 64


@pytest.mark.parametrize("step_tokens", [32, 256])
def test_case_32_twins_that_wait_do_not_make_the_loop_spin(step_tokens):
  """For want of tokens in a step, or (case 26) for one that was chosen and computes the prompt."""
  prompt = _tokens(200)
  requests = [_request(i, prompt) for i in range(4)]
  run = _Run(requests, serving=dataclasses.replace(SERVING, step_tokens=step_tokens))
  run.check_outputs(requests)
  first, *twins = run.records
  assert (first.computed_tokens, first.wait_rounds, first.delay_hit_tokens) == (200, 1, 0)
  for r in twins:
    assert _hits(r) >= 192
    assert r.wait_rounds > 1
    assert (r.deferrals, r.delay_hit_tokens) == ((0, 0) if step_tokens == 32 else (1, 196))
  assert run.result.plans <= len(run.result.steps) + 10


def test_case_45_short_and_long_prompts():
  requests = [
    _request(0, []),
    _request(1, [5]),
    _request(2, _tokens(30), max_new_tokens=10),
    _request(3, _tokens(30, seed=1), max_new_tokens=11),
  ]
  run = _Run(requests, context_tokens=40)
  assert [r.outcome for r in run.records] == ["refused", "finished", "finished", "refused"]
  assert run.records[1].output_ids == continuation(requests[1].prompt_ids, 3)


def test_preempted_requests_go_on_where_they_were():
  requests = [_request(i, _tokens(20, seed=i), max_new_tokens=60) for i in range(6)]
  cache = dataclasses.replace(CACHE, device_tokens=160)
  run = _Run(requests, cache=cache)
  run.check_outputs(requests)
  assert sum(r.preemptions for r in run.records) > 0
  assert all(r.late_hit_tokens == 0 for r in run.records)


@pytest.mark.parametrize("page_size", [1, 2])
def test_outputs_that_the_cache_has_already_need_no_second_room(page_size):
  # The second run of the prompt generates what the first did; its pages are in the tree twice.
  prompt = _tokens(64)
  requests = [_request(i, prompt, max_new_tokens=28) for i in range(3)]
  cache = CacheConfig(page_size=page_size, device_tokens=100, host_tokens=0)
  run = _Run(requests, cache=cache, serving=dataclasses.replace(SERVING, requests_in_flight=1))
  run.check_outputs(requests)


def test_decode_steps_under_one_plan_change_no_output():
  requests = _mixed(30)
  single = _Run(requests)
  several = _Run(requests, serving=dataclasses.replace(SERVING, decode_steps=4))
  several.check_outputs(requests)
  assert several.executor.steps < single.executor.steps


def test_step_rows_say_how_many_decode_steps_were_done():
  requests = [_request(0, _tokens(10), max_new_tokens=8)]
  run = _Run(requests, serving=dataclasses.replace(SERVING, decode_steps=5))
  done = [step.decode_steps for step in run.result.steps if step.decode_requests]
  assert sum(done) == 7  # the prefill gives the first of the 8 tokens
  assert max(done) > 1


def test_stale_entries_are_counted_whether_or_not_their_plan_starts_anything():
  real = make_policy("fcfs")
  wrong = iter([(88, 99), (88,)])

  def policy(view):
    resume = next(wrong, ())
    if len(resume) == 2:
      return StepPlan(version=view.version, resume=resume)
    return dataclasses.replace(real(view), resume=resume)

  run = _Run([_request(0, _tokens(10))], policy=policy)
  assert [step.stale for step in run.result.steps if step.prefill_tokens] == [1]
  assert metrics.summarize(run.result)["stale"] == 3


def test_a_stop_token_ends_the_output_before_it():
  prompt = _tokens(10)
  expected = continuation(prompt, 8)
  requests = [
    _request(0, prompt, max_new_tokens=8, stop_token_ids=(expected[5],)),
    _request(1, prompt, max_new_tokens=8, stop_token_ids=(expected[0],)),
    _request(2, prompt, max_new_tokens=2, stop_token_ids=(expected[5],)),
  ]
  for changes in ({}, {"decode_steps": 4}, {"plan_ahead": True}):
    run = _Run(requests, serving=dataclasses.replace(SERVING, **changes))
    end = expected.index(expected[5])
    assert [r.output_ids for r in run.records] == [expected[:end], [], expected[:2]]
    assert [r.reason for r in run.records] == ["stop", "stop", "length"]


def test_near_ties_behind_the_stop_token_do_not_count(monkeypatch):
  wait = PageCheckingExecutor.wait

  def wait_with_ties(self, until_s):
    return [
      event._replace(near_ties={i: tuple(range(len(ids))) for i, ids in event.tokens.items()})
      if isinstance(event, StepDone)
      else event
      for event in wait(self, until_s)
    ]

  monkeypatch.setattr(PageCheckingExecutor, "wait", wait_with_ties)
  prompt = _tokens(20)
  outputs = continuation(prompt, 12)
  end = outputs.index(outputs[5])
  request = _request(0, prompt, max_new_tokens=12, stop_token_ids=(outputs[5],))
  run = _Run([request], serving=dataclasses.replace(SERVING, decode_steps=4))
  assert run.records[0].output_ids == outputs[:end]
  assert run.records[0].near_ties == list(range(end + 1))  # that of the stop token does


def test_forced_outputs_win_over_the_length():
  forced = np.array([9, 8, 7, 6, 5], np.int32)
  requests = [
    _request(0, _tokens(9), max_new_tokens=1, forced_output_ids=forced),
    _request(1, _tokens(9, seed=1), max_new_tokens=0),
    _request(2, _tokens(9, seed=2), max_new_tokens=1),
    _request(3, _tokens(9, seed=3), forced_output_ids=np.zeros(0, np.int32)),
  ]
  run = _Run(requests)
  assert run.records[0].output_ids == forced.tolist()
  assert [len(r.output_ids) for r in run.records] == [5, 0, 1, 0]
  assert all(r.ttft_s is not None for r in run.records)


def test_arrivals_keep_their_times_and_the_cap_is_a_fifo():
  requests = [_request(i, _tokens(40, seed=i), arrival_s=0.001 * i) for i in range(12)]
  run = _Run(requests, serving=dataclasses.replace(SERVING, requests_in_flight=2))
  run.check_outputs(requests)
  assert [r.arrival_s for r in run.records] == [0.001 * i for i in range(12)]
  dispatched = [r.dispatched_s for r in run.records]
  assert dispatched == sorted(dispatched)
  assert run.records[-1].row()["client_s"] > 0
  for r in run.records:
    others = [o for o in run.records if o.dispatched_s <= r.dispatched_s < o.over_s]
    assert len(others) <= 2


def test_times_count_from_the_start_of_the_run():
  requests = [_request(0, _tokens(10), arrival_s=1.0)]
  executor = PageCheckingExecutor(CACHE)
  executor.expect(0, requests[0].prompt_ids)
  executor.wait(100.0)
  result = serving_loop.serve(
    requests,
    controller=CacheController(CACHE, SERVING),
    policy=make_policy("strata"),
    executor=executor,
    serving=SERVING,
  )
  (record,) = result.requests
  assert (record.arrival_s, record.dispatched_s) == (1.0, pytest.approx(1.0))
  assert 1.0 < record.over_s < 2.0
  assert 1.0 < result.ended_s < 2.0
  assert all(1.0 <= step.started_s <= step.ended_s <= result.ended_s for step in result.steps)


def test_a_follower_arrives_when_the_one_before_it_is_over():
  requests = [
    _request(0, _tokens(10), abort_s=0.0),
    _request(1, _tokens(10), follows=0, think_s=2.0),
    _request(2, _tokens(300), follows=1, think_s=0.5),
    _request(3, _tokens(10), follows=2),
  ]
  run = _Run(requests)
  assert [r.outcome for r in run.records] == ["aborted", "finished", "refused", "finished"]
  zero, one, two, three = run.records
  assert one.arrival_s == zero.over_s + 2.0
  assert two.arrival_s == one.over_s + 0.5
  assert three.arrival_s == two.over_s


def test_hooks_see_every_plan_and_every_end():
  requests = _mixed(10)
  seen, over = [], []
  run = _Run(
    requests,
    recorder=lambda view, plan: seen.append((view.version, plan.version)),
    progress=lambda done, total: over.append((done, total)),
  )
  assert len(seen) == run.result.plans
  assert all(view == plan for view, plan in seen)
  assert over == [(i, 10) for i in range(1, 11)]


def test_a_policy_that_never_acts_ends_in_a_refusal_with_a_reason():
  plans = []

  def idle(view):
    plans.append(view)
    return StepPlan(version=view.version)

  requests = [_request(i, _tokens(10, seed=i)) for i in range(3)]
  run = _Run(requests, policy=idle, serving=dataclasses.replace(SERVING, requests_in_flight=2))
  assert [r.outcome for r in run.records] == ["refused"] * 3
  assert all("deadlock" in r.reason for r in run.records)
  assert run.result.deadlocks == 2  # the cap let the third in after the first two
  assert len(plans) < 10


def test_a_round_that_only_defers_waits_for_the_load_under_way():
  """Case 32: nothing computes, requests arrive, and they are deferred once each of these times."""
  real = make_policy("fcfs")

  def policy(view):
    if view.parked is not None and view.parked.load_tokens_left:
      waits = tuple(Deferred(r.request_id, "in_flight", ()) for r in view.waiting)
      return StepPlan(version=view.version, deferred=waits)
    plan = real(view)
    return dataclasses.replace(plan, park=tuple(e.request_id for e in plan.prefill if e.loads))

  document = _tokens(120)
  requests = [_request(0, [*document, 1]), _request(1, _tokens(120, seed=1), follows=0)]
  late = [(2 + i, 1.0 + 1e-4 * i) for i in range(4)]
  requests += [_request(i, [*document, i], follows=1, think_s=at_s) for i, at_s in late]
  run = _Run(requests, cache=dataclasses.replace(CACHE, device_tokens=160), policy=policy)
  run.check_outputs(requests)
  assert [r.deferrals for r in run.records] == [0, 0, 0, 3, 2, 1]


def test_a_policy_that_asks_to_be_woken_is():
  real = make_policy("fcfs")

  def late(view):
    if view.waiting and view.now_s < 3.0:
      return StepPlan(version=view.version, wake_at_s=3.0, postponed=(0,))
    return real(view)

  requests = [_request(0, _tokens(10))]
  run = _Run(requests, policy=late)
  run.check_outputs(requests)
  assert run.records[0].admitted_s == 3.0
  assert run.result.plans < 10


@pytest.mark.parametrize("wake_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_policy_that_asks_for_a_time_that_never_comes_is_refused(wake_s):
  plans = []

  def always(view):
    plans.append(view)
    assert len(plans) < 100, "the loop spins"
    return StepPlan(version=view.version, wake_at_s=view.now_s + wake_s)

  run = _Run([_request(0, _tokens(10))], policy=always)
  assert run.result.deadlocks == 1
  assert run.result.ended_s == 0.0


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"request_id": 0}, "expected distinct ids"),
    ({"follows": 7}, "expected to follow an earlier request"),
    ({"follows": 1}, "expected to follow an earlier request"),
    ({"arrival_s": -1.0}, "expected a finite arrival_s >= 0"),
    ({"arrival_s": float("inf")}, "expected a finite arrival_s >= 0"),
    ({"arrival_s": float("nan")}, "expected a finite arrival_s >= 0"),
    ({"think_s": -1.0}, "expected a finite think_s >= 0"),
    ({"abort_s": -1.0}, "expected a finite abort_s >= 0"),
  ],
)
def test_impossible_requests_are_refused_before_the_run(fields, message):
  second = dataclasses.replace(_request(1, [1]), **fields)
  with pytest.raises(ValueError, match=message):
    _Run([_request(0, [1]), second])


def test_the_same_seed_gives_the_same_run():
  requests = [
    dataclasses.replace(r, arrival_s=0.01 * i) for i, r in enumerate(_mixed(40, documents=8))
  ]
  cache = dataclasses.replace(CACHE, device_tokens=128)
  first, second = _Run(requests, cache=cache), _Run(requests, cache=cache)
  assert [r.row() for r in first.records] == [r.row() for r in second.records]
  assert first.result.steps == second.result.steps


@settings(max_examples=40, deadline=None)
@given(
  seed=st.integers(0, 2**20),
  page_size=st.sampled_from([1, 2, 4, 8]),
  device_pages=st.integers(16, 60),
  host_pages=st.integers(0, 60),
  write_policy=st.sampled_from(["write_through", "write_through_selective", "write_back", "none"]),
  policy=st.sampled_from(["strata", "fcfs", "longest_prefix", "shortest_load", "dedup"]),
  step_tokens=st.sampled_from([8, 24, 200]),
  in_flight=st.integers(1, 12),
  decode_steps=st.integers(1, 4),
  timed=st.booleans(),
  plan_ahead=st.booleans(),
)
def test_any_workload_under_any_config_gives_the_outputs_without_cache(
  seed, page_size, device_pages, host_pages, write_policy, policy, step_tokens, in_flight,
  decode_steps, timed, plan_ahead,
):  # fmt: skip
  cache = CacheConfig(
    page_size=page_size,
    device_tokens=device_pages * page_size,
    host_tokens=host_pages * page_size,
    write_policy=write_policy,
  )
  serving = ServingConfig(
    requests_in_flight=in_flight,
    running_requests=8,
    batch_requests=4,
    step_tokens=step_tokens,
    decode_steps=decode_steps,
    plan_ahead=plan_ahead,
  )
  rng = np.random.default_rng(seed)
  room = device_pages * page_size
  requests = []
  for i in range(24):
    shared = _tokens(int(rng.integers(0, room // 3)), seed=int(rng.integers(3)))
    tail = _tokens(int(rng.integers(1, 6)), seed=int(rng.integers(2**20)))
    requests.append(
      _request(
        i,
        np.concatenate([shared, tail]),
        max_new_tokens=int(rng.integers(1, max(2, room // 4))),
        arrival_s=float(rng.uniform(0, 0.5)) if timed else None,
      )
    )
  run = _Run(requests, cache=cache, serving=serving, policy=policy, seed=seed)
  run.check_outputs(requests)


@settings(max_examples=40, deadline=None)
@given(
  seed=st.integers(0, 2**20),
  page_size=st.sampled_from([1, 4]),
  device_tokens=st.integers(140, 240),
  in_flight=st.integers(4, 12),
  join_loading=st.booleans(),
  order=st.sampled_from(["fcfs", "most_shared"]),
  plan_ahead=st.booleans(),
)
def test_so_it_is_where_most_of_what_is_asked_for_is_parked(
  seed, page_size, device_tokens, in_flight, plan_ahead, **scheduler
):
  """Contexts that are in host memory, and others that hit them while they are being loaded."""
  cache = CacheConfig(page_size=page_size, device_tokens=device_tokens, host_tokens=1024)
  serving = dataclasses.replace(SERVING, requests_in_flight=in_flight, plan_ahead=plan_ahead)
  policy = make_policy("strata", SchedulerConfig(ratio_threshold=1.0, **scheduler))
  requests = _mixed(60, seed=seed, documents=6)
  run = _Run(requests, cache=cache, serving=serving, policy=policy, seed=seed)
  run.check_outputs(requests)
