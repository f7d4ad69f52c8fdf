import dataclasses
import math

import numpy as np
import pytest

from strata_jax import simulation as sim
from strata_jax import systems
from strata_jax.workloads import arrivals, synthetic
from strata_jax.workloads.request import Request
from strata_jax.workloads.workload import Workload

PROFILE = sim.find_profile("h200", "llama31_8b")
SMALL = dataclasses.replace(
  synthetic.LOOGLE, contexts=8, queries=60, mean_input_tokens=2000, name="small"
)
POOLS = sim.PoolSizes(device_tokens=8_000, host_tokens=40_000)


def small(seed=0, order="shuffled", rate=None):
  workload = synthetic.documents(SMALL, order=order, seed=seed)
  return workload if rate is None else arrivals.poisson(workload, rate, seed)


def simulate(workload, name="strata", **options):
  options.setdefault("pools", POOLS)
  return sim.simulate(workload, PROFILE, systems.system(name), **options)


@pytest.mark.parametrize("name", sorted(systems.SYSTEMS))
def test_every_system_serves_and_keeps_the_laws(name):
  summary = simulate(small(rate=20.0), name).summary()
  assert summary["finished"] == 60
  assert summary["deadlocks"] == summary["stale"] == 0


@pytest.mark.parametrize("name", ["strata", "hicache_paper", "trtllm_like", "strata_selective"])
@pytest.mark.parametrize("initial_cache", ["host_warm", "device_warm"])
def test_a_warm_cache_is_hit_from_the_first_request_on(name, initial_cache):
  run = simulate(small(order="spread", rate=5.0), name, initial_cache=initial_cache)
  first = run.result.requests[0]
  # Of the first context everything is cached but its last, partly filled page.
  assert first.host_hit_tokens > 0.95 * first.prompt_tokens
  cold = simulate(small(order="spread", rate=5.0), name)
  assert cold.result.requests[0].host_hit_tokens == 0


def test_device_warm_keeps_the_latest_contexts_on_the_device():
  run = simulate(
    small(order="spread", rate=0.5), initial_cache="device_warm",
    pools=sim.PoolSizes(device_tokens=20_000, host_tokens=40_000),
  )  # fmt: skip
  assert sum(r.device_hit_tokens for r in run.result.requests[:8]) > 10_000


def test_step_rows_count_the_decode_steps_that_were_done():
  # Arrivals end the decode steps of a plan early; the prefill gives each first token.
  serving = dataclasses.replace(sim.SERVING, decode_steps=64)
  result = simulate(small(rate=20.0), serving=serving).result
  decoded = sum(step.decode_requests * step.decode_steps for step in result.steps)
  assert decoded == sum(len(r.output_ids) - 1 for r in result.requests)


def test_hit_rate_of_write_through_reaches_the_ceiling():
  workload = synthetic.documents(dataclasses.replace(SMALL, queries=160))
  workload = arrivals.fixed(workload, 2.0)  # slow: nobody is computing what another asks for
  summary = simulate(workload).summary()
  questions = workload.input_tokens - sum(
    len(workload.contexts[int(np.searchsorted([c[0] for c in workload.contexts], r.prompt_ids[0]))])
    for r in workload.requests
  )  # fmt: skip
  distinct = sum(len(context) for context in workload.contexts)
  ceiling = 1 - (distinct + questions) / workload.input_tokens
  assert summary["hit_ratio"] == pytest.approx(ceiling, abs=0.002)


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
  rows = [
    [record.row() for record in simulate(small(seed, rate=20.0)).result.requests]
    for seed in (0, 0, 1)
  ]
  assert rows[0] == rows[1]
  assert rows[0] != rows[2]


def test_free_loads_are_a_bound():
  workload = arrivals.closed(small())
  for name in ("strata", "hicache_batch", "strata_io"):
    system = systems.system(name)
    free = sim.system_with(system, {"load_is_free": True, "scheduler.ratio_threshold": math.inf})
    real, bound = (
      sim.simulate(workload, PROFILE, s, pools=POOLS, initial_cache="host_warm").summary()
      for s in (system, free)
    )
    assert real["output_tokens_per_s"] <= 1.01 * bound["output_tokens_per_s"]


def test_thresholds_at_infinity_give_fcfs_exactly():
  never = {
    "scheduler.deferral_threshold_tokens": math.inf,
    "scheduler.ratio_threshold": math.inf,
    "scheduler.bundle_min_shared_tokens": math.inf,
  }
  plans = []
  for system in (
    sim.system_with(systems.system("strata"), never),
    systems.system("strata_io"),
  ):
    seen = []
    run = sim.simulate(
      arrivals.closed(small()), PROFILE, system, pools=POOLS,
      recorder=lambda view, plan, seen=seen: seen.append(plan),
    )  # fmt: skip
    plans.append((seen, [record.row() for record in run.result.requests], run.result.steps))
  assert plans[0] == plans[1]
  assert len(plans[0][0]) > 20


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["no_reuse", "sharegpt_like"])
def test_where_nothing_is_shared_nothing_is_lost(workload):
  requests = synthetic.GENERATORS[workload](0)
  requests = arrivals.closed(requests.with_requests(requests.requests[:300]))
  device, strata = (
    sim.simulate(requests, PROFILE, systems.system(name)).summary()["output_tokens_per_s"]
    for name in ("sglang_device", "strata")
  )
  assert strata == pytest.approx(device, rel=0.02)


def queue_of(count, rho, seed=0):
  """Identical short requests, one at a time, with exponential gaps in a random order.

  The gaps are quantiles of the distribution, so that their mean is exact.
  """
  quantiles = -np.log1p(-(np.arange(count) + 0.5) / count)
  gaps = np.random.default_rng(seed).permutation(quantiles)
  service_s = sim.CostModel(PROFILE, sim.IoConfig()).prefill_s([(64, 0)])
  times = np.cumsum(gaps * (service_s / rho / gaps.mean()))
  ids = np.arange(count * 65, dtype=np.int32).reshape(count, 65)
  requests = tuple(
    Request(request_id=i, prompt_ids=ids[i, :64], forced_output_ids=ids[i, 64:], max_new_tokens=1,
            arrival_s=float(times[i]))
    for i in range(count)
  )  # fmt: skip
  return Workload(name="queue", requests=requests), times, service_s


def waiting_s(count, rho, seed=0):
  """Mean waiting in the simulator and by Lindley's recursion, and the service time."""
  workload, times, service_s = queue_of(count, rho, seed)
  serving = dataclasses.replace(
    sim.SERVING, batch_requests=1, running_requests=1, requests_in_flight=10**6
  )
  run = sim.simulate(
    workload, PROFILE, systems.system("recompute"), serving=serving,
    pools=sim.PoolSizes(device_tokens=4096),
  )  # fmt: skip
  simulated = np.array([r.ttft_s for r in run.result.requests]) - service_s
  free_s, lindley = 0.0, []
  for at_s in times:
    lindley.append(max(0.0, free_s - at_s))
    free_s = at_s + lindley[-1] + service_s
  return simulated, np.array(lindley), service_s


def test_waiting_is_lindleys_request_by_request():
  simulated, lindley, service_s = waiting_s(500, 0.8)
  np.testing.assert_allclose(simulated, lindley, atol=1e-6 * service_s)
  assert lindley.max() > 2 * service_s


@pytest.mark.slow
@pytest.mark.parametrize("rho", [0.3, 0.5])
def test_mean_waiting_is_that_of_an_m_d_1_queue(rho):
  simulated, _, service_s = waiting_s(12_000, rho)
  expected_s = service_s * rho / (2 * (1 - rho))
  assert simulated.mean() == pytest.approx(expected_s, rel=0.02)


def test_isolated_ttft_is_what_a_lone_request_takes():
  workload = small()
  lone = workload.with_requests(
    dataclasses.replace(r, arrival_s=60.0 * i) for i, r in enumerate(workload.requests[:5])
  )
  run = simulate(lone, "recompute")
  costs = run.costs
  assert run.summary()["ttft_mean_s"] == pytest.approx(
    sim.isolated_ttft_s(lone, costs, sim.SERVING), rel=1e-6
  )


def test_a_storage_tier_serves_what_the_host_tier_dropped():
  workload = small(order="spread", rate=1.0)
  pools = sim.PoolSizes(device_tokens=5_000, host_tokens=6_000)  # of about 16,000 in all contexts
  system = systems.system("strata")
  none, kept = (
    sim.simulate(workload, PROFILE, sim.system_with(system, changes), pools=pools)
    for changes in ({}, {"storage": "private", "scheduler.prefetch": "wait_complete"})
  )
  assert none.summary()["storage_hit_tokens"] == 0
  assert kept.summary()["storage_hit_tokens"] > 50_000
  assert kept.summary()["computed_tokens"] < none.summary()["computed_tokens"]


def test_overrides_reach_the_system_and_its_scheduler():
  base = systems.system("strata")
  changed = sim.system_with(base, {"page_size": 8, "scheduler.ratio_threshold": 3.0})
  assert (changed.page_size, changed.scheduler_config.ratio_threshold) == (8, 3.0)
  assert sim.system_with(base, {}) == base
  for wrong in ({"pages": 8}, {"scheduler.ratio": 1}):
    with pytest.raises(ValueError, match="expected fields that exist"):
      sim.system_with(base, wrong)


def test_profiles_are_found_by_hardware_and_model():
  assert sim.find_profile("h200", "llama31_70b").name == "h200_llama31_70b_tp4"
  with pytest.raises(ValueError, match=r"to be one of .*h200_llama31_8b"):
    sim.find_profile("h200", "llama")


def test_mistakes_are_refused():
  with pytest.raises(ValueError, match="initial_cache: expected one of"):
    simulate(small(), initial_cache="warm")
  with pytest.raises(ValueError, match="expected a workload with shared contexts"):
    simulate(synthetic.no_reuse(requests=2, input_tokens=100), initial_cache="host_warm")
