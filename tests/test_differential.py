"""One workload through the JAX executor and the simulated one: the same decisions, step by step."""

import dataclasses
import functools

import numpy as np
import pytest

from strata_jax import serving_loop
from strata_jax.cache_controller import CacheController
from strata_jax.config import MODELS, CacheConfig, ServingConfig
from strata_jax.executors import buckets, jax_executor
from strata_jax.executors.protocol import StepDone
from strata_jax.executors.simulated import SimulatedExecutor
from strata_jax.executors.timeline import RecordedStep, RecordedTimeline
from strata_jax.models import random
from strata_jax.radix_tree import DEVICE, HOST
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import make_policy
from strata_jax.workloads.request import Request

PAGE_SIZE = 4
SERVING = ServingConfig(
  requests_in_flight=6, running_requests=4, batch_requests=4, step_tokens=64, decode_steps=1
)
MODEL = dataclasses.replace(MODELS["tiny"], context_tokens=256)


class Recorded:
  """An executor that notes when its events were handed out: at once, at the time of the last.

  A real clock moves on between an event and the plan that follows it; what decides is which events
  a plan knew.
  """

  def __init__(self, inner):
    self.inner = inner
    self.steps = {}
    self.transfers = {}

  def __getattr__(self, name):
    return getattr(self.inner, name)

  def wait(self, until_s):
    events = self.inner.wait(until_s)
    if not events:
      return events
    at_s = max(event.at_s for event in events)
    events = [event._replace(at_s=at_s) for event in events]
    for event in events:
      if isinstance(event, StepDone):
        self.steps[event.step_id] = RecordedStep(
          started_s=event.started_s, prefill_end_s=event.prefill_end_s, at_s=at_s,
          compute_s=event.compute_s, stall_s=event.stall_s,
        )  # fmt: skip
      else:
        self.transfers[event.transfer_id] = at_s
    return events


def workload():
  """24 questions about 5 documents, more than the device holds; two prompts run in chunks."""
  rng = np.random.default_rng(5)
  contexts = [rng.integers(0, 128, size, dtype=np.int32) for size in (40, 56, 72, 88, 120)]
  requests = []
  for request_id in range(24):
    context = contexts[int(rng.integers(len(contexts)))]
    question = rng.integers(0, 128, int(rng.integers(1, 9)), dtype=np.int32)
    requests.append(
      Request(
        request_id=request_id, prompt_ids=np.concatenate([context, question]),
        max_new_tokens=int(rng.integers(1, 12)),
      )
    )  # fmt: skip
  return requests


@functools.cache
def executor():
  made = jax_executor.JaxExecutor(
    MODEL, random.random_params(MODEL, seed=3), MODEL.page_layout(PAGE_SIZE),
    device_pages=64, host_pages=160,
    buckets=buckets.make_buckets(
      MODEL.page_layout(PAGE_SIZE), SERVING, device_pages=64, context_tokens=256
    ),
  )  # fmt: skip
  made.warmup()
  return made


def serve(requests, executor, write_policy):
  """The run's records and, for every plan, what it was made from and what it decided."""
  controller = CacheController(
    CacheConfig(
      page_size=PAGE_SIZE, device_tokens=64 * PAGE_SIZE, host_tokens=160 * PAGE_SIZE,
      write_policy=write_policy,
    ),
    SERVING,
  )  # fmt: skip
  policy = make_policy(
    "strata", SchedulerConfig(ratio_threshold=3.0, deferral_threshold_tokens=8.0)
  )
  seen = []

  def record(view, plan):
    tree = sorted(
      (node.id, node.start, node.end, node.state, node.slots[DEVICE] is not None,
       node.slots[HOST] is not None, tuple(node.locks))
      for node in controller.tree.nodes.values()
    )  # fmt: skip
    waiting = tuple(dataclasses.replace(request, arrival_s=0.0) for request in view.waiting)
    running = tuple(request._replace(arrival_s=0.0) for request in view.running)
    timeless = dataclasses.replace(view, now_s=0.0, waiting=waiting, running=running)
    seen.append((timeless, plan, tree))

  result = serving_loop.serve(
    requests, controller=controller, policy=policy, executor=executor, serving=SERVING,
    recorder=record,
  )  # fmt: skip
  controller.check()
  return result, seen


@pytest.mark.slow
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_the_same_decisions_hits_and_trees_in_both_executors(write_policy):
  requests = workload()
  real_executor = Recorded(executor())
  real_executor.restart_clock()
  real, real_seen = serve(requests, real_executor, write_policy)
  outputs = {r.request_id: np.array(r.output_ids, dtype=np.int32) for r in real.requests}
  forced = [
    dataclasses.replace(request, forced_output_ids=outputs[request.request_id])
    for request in requests
  ]
  timeline = RecordedTimeline(real_executor.steps, real_executor.transfers)
  simulated, simulated_seen = serve(forced, SimulatedExecutor(timeline), write_policy)

  for step, (ours, theirs) in enumerate(zip(simulated_seen, real_seen, strict=True)):
    for name, one, other in zip(("view", "plan", "tree"), ours, theirs, strict=True):
      assert one == other, f"{name} {step}"
  counted = (
    "outcome", "device_hit_tokens", "host_hit_tokens", "delay_hit_tokens", "bundle_hit_tokens",
    "computed_tokens", "recomputed_tokens", "deferrals", "postponements", "preemptions",
    "output_ids",
  )  # fmt: skip
  for ours, theirs in zip(simulated.requests, real.requests, strict=True):
    assert {k: getattr(ours, k) for k in counted} == {k: getattr(theirs, k) for k in counted}
  # The workload is worth it: loads, evictions, deferrals and chunked prompts all happen.
  assert sum(r.host_hit_tokens for r in real.requests) > 0
  assert sum(r.deferrals for r in real.requests) > 0
  assert any(step.prefill_tokens == SERVING.step_tokens for step in real.steps)
