"""Serving with parked loads that take a while: who hits pages on the way gets what it should.

The driver's part is played by the CPU, which is late. Contexts are in host memory and the
device has room for some of them, so that requests hit pages that another one's parked load brings.
Loads that are not parked come whole, before the compute, or layer by layer, behind gates.
"""

import dataclasses
import random
import threading
import time

import jax
import numpy as np
import pytest

from strata_jax import config as config_lib
from strata_jax import metrics, serving_loop, systems, warm_cache
from strata_jax.cache_controller import CacheController
from strata_jax.config import CacheConfig, ServingConfig
from strata_jax.executors import choices, protocol
from strata_jax.models import random as random_models
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import make_policy
from strata_jax.scheduler.views import StepPlan
from strata_jax.tiers import cuda_copies
from strata_jax.workloads.request import Request
from tests.executors import driver, test_gated_loads
from tests.tiers import cpu_driver

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="copies by the CPU")

PAGE_SIZE, CONTEXTS, CONTEXT_TOKENS, REQUESTS = 8, 10, 96, 80
# Room for most contexts, were it not for the requests' own ends; and for all that is generated.
CACHE = CacheConfig(page_size=PAGE_SIZE, device_tokens=768, host_tokens=5120)
SERVING = ServingConfig(
  requests_in_flight=12, running_requests=12, batch_requests=4, step_tokens=128, decode_steps=2
)
MODEL = dataclasses.replace(config_lib.MODELS["tiny"], num_layers=3)
# Contexts are short here: with the usual threshold no batch would be loading-bound.
APART = SchedulerConfig(ratio_threshold=2.0, join_loading=False)
TOGETHER = dataclasses.replace(systems.system("strata_auto").scheduler_config, ratio_threshold=2.0)


class _LateDriver:
  """Carries copies out some launches later, or when the executor has nothing else to do."""

  def __init__(self):
    self._rng = random.Random(0)
    self._changed = threading.Condition()
    self._launches = 0
    self._idle = False

  def copy(self, copies, stream):
    with self._changed:
      until = self._launches + self._rng.randint(1, 4)
      self._changed.wait_for(lambda: self._idle or self._launches >= until, timeout=10)
    time.sleep(self._rng.uniform(0.0, 0.005))
    cpu_driver.copy(copies, stream)

  def goes_on(self, *, launches=0, idle):
    with self._changed:
      self._launches += launches
      self._idle = idle
      self._changed.notify_all()


class _Watched:
  """An executor; counts prefills that read what a parked load is still bringing in."""

  def __init__(self, executor, late):
    self._executor, self._late = executor, late
    self._on_the_way = set()
    self._busy = self._stands = False  # a step computes; it stands at gates
    self._plan = StepPlan(version=0)
    self.admitted_early = 0  # of requests that were not parked themselves
    self.resumed_early = 0
    self.joined = 0  # parked although others load what they hit

  def __getattr__(self, name):
    return getattr(self._executor, name)

  def planned(self, view, plan):
    self._plan = plan
    self.joined += sum(
      request.request_id in plan.park and any(span.state == "loading" for span in request.path)
      for request in view.waiting
    )

  def launch(self, work):
    early = {
      prefill.request_id
      for prefill in work.prefills
      if not self._on_the_way.isdisjoint(prefill.waits_for)
    }
    self.resumed_early += len(early & set(self._plan.resume))
    self.admitted_early += len(early - set(self._plan.resume))
    self._on_the_way.update(work.parked_loads)
    self._busy = self._busy or work.computes
    self._stands = self._stands or len(work.loads) > len(work.parked_loads)
    self._late.goes_on(launches=1, idle=bool(early) or self._stands)
    self._executor.launch(work)

  def wait(self, until_s):
    self._late.goes_on(idle=self._stands or not self._busy)
    events = self._executor.wait(until_s)
    for event in events:
      if isinstance(event, protocol.LoadDone):
        self._on_the_way.discard(event.transfer_id)
      elif isinstance(event, protocol.StepDone):
        self._busy = self._stands = False
    return events


def _contexts():
  rng = np.random.default_rng(0)
  return list(rng.integers(0, MODEL.vocab_size, (CONTEXTS, CONTEXT_TOKENS), dtype=np.int32))


def _requests():
  rng, contexts = np.random.default_rng(1), _contexts()
  return [
    Request(
      request_id=i,
      prompt_ids=np.concatenate([
        contexts[rng.integers(CONTEXTS)],
        rng.integers(0, MODEL.vocab_size, rng.integers(1, 6), dtype=np.int32),
      ]),
      max_new_tokens=int(rng.integers(2, 24)),
    )
    for i in range(REQUESTS)
  ]  # fmt: skip


@pytest.fixture(scope="module")
def late():
  return _LateDriver()


@pytest.fixture(
  scope="module",
  params=[(choices.STAGED, "whole"), ("memcpy_async", "whole"), (choices.STAGED, "layer")],
  ids="-".join,
)
def executor(request, late):
  way, overlap = request.param
  with pytest.MonkeyPatch.context() as patch:
    cpu_driver.install(patch)
    patch.setattr(cuda_copies, "cuda_module", lambda name: test_gated_loads.Runtime())
    patch.setattr(choices, "loads_aside", lambda *args: way)
    patch.setattr(choices, "layer_loads", lambda *args: "copy_engine")
    for name in ("submit_each", "submit_batch"):
      patch.setattr(cuda_copies, name, late.copy)
    made = driver.make_executor(
      MODEL, random_models.random_params(MODEL, seed=5), PAGE_SIZE,
      device_pages=CACHE.device_pages, host_pages=CACHE.host_pages, context=128,
      chunks=(32,), joint_tokens=32, overlap=overlap, layers_per_program=(1, 2),
    )  # fmt: skip
    made.warmup()
    yield made


@pytest.fixture(scope="module")
def without_cache(executor):
  """What the model answers when every request is computed from its first token."""
  controller = CacheController(dataclasses.replace(CACHE, enabled=False), SERVING)
  return serving_loop.serve(
    _requests(), controller=controller, policy=make_policy("fcfs"), executor=executor,
    serving=SERVING,
  ).requests  # fmt: skip


def _serve(executor, late, scheduler, **changes):
  """Serves with all contexts in host memory and none on the device."""
  serving = dataclasses.replace(SERVING, **changes)
  controller, policy = CacheController(CACHE, serving), make_policy("strata", scheduler)
  warm_cache.ask_once(
    _contexts(), controller=controller, policy=policy, executor=executor, serving=serving
  )
  warm_cache.flush_device(controller, executor)
  assert not warm_cache.missing_on_host(controller, _contexts())
  watched = _Watched(executor, late)
  result = serving_loop.serve(
    _requests(), controller=controller, policy=policy, executor=watched, serving=serving,
    recorder=watched.planned,
  )  # fmt: skip
  controller.check()
  assert all(record.outcome == "finished" for record in result.requests)
  return result, watched


@pytest.mark.parametrize("plan_ahead", [False, True])
@pytest.mark.parametrize("scheduler", [APART, TOGETHER], ids=["apart", "together"])
def test_outputs_are_those_without_a_cache(executor, late, without_cache, scheduler, plan_ahead):
  result, watched = _serve(executor, late, scheduler, plan_ahead=plan_ahead)
  assert metrics.identical_outputs(result.requests, without_cache) == (True, [])
  assert sum(len(record.near_ties) for record in result.requests) < 10  # nearly all are compared
  if scheduler.join_loading:
    assert watched.joined
  else:
    assert watched.admitted_early
    assert not watched.joined


@pytest.mark.parametrize("scheduler", [APART, TOGETHER], ids=["apart", "together"])
def test_so_they_are_when_nothing_fills_the_bubble(executor, late, without_cache, scheduler):
  """Who is parked resumes before its own load has come, since nobody decodes any more."""
  result, watched = _serve(executor, late, scheduler, requests_in_flight=2, plan_ahead=True)
  assert metrics.identical_outputs(result.requests, without_cache) == (True, [])
  assert watched.resumed_early
