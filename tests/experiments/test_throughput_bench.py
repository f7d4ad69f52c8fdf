import dataclasses

import pytest

from experiments import synthetic_flags
from experiments.executor_flags import ExecutorConfig
from experiments.synthetic_flags import ShapeConfig
from experiments.throughput_bench import Bench, BenchConfig
from experiments.throughput_plan import Contender, Point
from strata_jax import metrics, systems, warm_cache
from strata_jax.config import MODELS, ServingConfig
from strata_jax.executors import page_mover
from strata_jax.models import random

_CONFIG = BenchConfig(
  model=MODELS["tiny"], device_tokens=256, host_tokens=2048,
  serving=ServingConfig(requests_in_flight=8, running_requests=1, step_tokens=64),
  executor=ExecutorConfig(), initial_cache="host_warm", with_costs=True, point_limit_s=60.0, seed=0,
)  # fmt: skip
_SHAPE = ShapeConfig(contexts=3, context_tokens=100, queries=9, question_tokens=8, output_tokens=4)


def _bench(names, **changes):
  """Two labels, each with a system."""
  contenders = tuple(
    Contender(
      label=label, system=dataclasses.replace(systems.system(name), page_size=8), rates_rps=(40.0,)
    )
    for label, name in zip(("first", "second"), names, strict=True)
  )
  workload = synthetic_flags.generate("loogle_like_spread", _SHAPE, 0)
  params = random.random_params(_CONFIG.model, 0)
  return Bench(dataclasses.replace(_CONFIG, **changes), params, workload, contenders)


@pytest.mark.slow
def test_outputs_are_checked_against_those_without_a_cache(monkeypatch):
  bench = _bench(("vllm_lmcache_like", "device_put"))
  point = Point(label="first", rate_rps=40.0, repeat=0)
  row = bench.run(point, checked_requests=4).row
  assert (row["checked_requests"], row["outputs_identical"]) == (4, True)
  row = bench.run(dataclasses.replace(point, repeat=1)).row  # and what is cached is as it was
  assert row["host_hit_tokens"] > 150
  assert (row["checked_requests"], row["outputs_identical"]) == (0, None)
  # Loads that bring nothing: what is read is not what was computed.
  monkeypatch.setattr(page_mover.PageMover, "load", lambda self, host, pools, *slots: pools)
  row = bench.run(dataclasses.replace(point, repeat=2), checked_requests=100).row
  assert row["checked_requests"] == row["finished"] == 9
  assert row["outputs_identical"] is False
  assert row["different_requests"]


@pytest.mark.slow
def test_pools_that_change_hands_keep_what_the_host_holds():
  points = [Point(label=label, rate_rps=40.0, repeat=0) for label in ("first", "second", "first")]
  points[2] = dataclasses.replace(points[2], repeat=1)
  cached = _bench(("vllm_lmcache_like", "device_put"))
  computed = _bench(("recompute", "recompute"), initial_cache="cold")
  for number, point in enumerate(points):
    found, expected = cached.run(point), computed.run(point)
    assert found.row["warmed_contexts"] == (3 if number == 0 else 0)
    assert found.row["host_hit_tokens"] > 150  # the first three requests, about three contexts
    assert expected.row["device_hit_tokens"] == expected.row["host_hit_tokens"] == 0
    identical, different = metrics.identical_outputs(
      found.result.requests, expected.result.requests
    )
    assert identical, different


@pytest.mark.slow
def test_contexts_that_did_not_stay_are_brought_again(monkeypatch):
  ask_once, asked = warm_cache.ask_once, []

  def all_but_the_last(contexts, **how):
    asked.append(len(contexts))
    return ask_once(contexts[: len(contexts) - (len(asked) == 1)], **how)

  monkeypatch.setattr(warm_cache, "ask_once", all_but_the_last)
  point = Point(label="first", rate_rps=40.0, repeat=0)
  row = _bench(("vllm_lmcache_like", "device_put")).run(point).row
  assert asked == [3, 1]
  assert row["warmed_contexts"] == 3
