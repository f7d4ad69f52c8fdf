"""A whole simulated run: workload, profile and system in, serving result and checks out.

profile = find_profile("h200", "llama31_8b")
run = simulate(workload, profile, systems.system("strata"))
run.result, run.summary()
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from strata_jax import (
  metrics,
  policy_loading,
  profile,
  serving_loop,
  simulation_checks,
  warm_cache,
)
from strata_jax.cache_controller import CacheController
from strata_jax.config import CacheConfig, ServingConfig, StorageConfig
from strata_jax.cost_model import CostModel, IoConfig
from strata_jax.executors.buckets import Buckets
from strata_jax.executors.simulated import SimulatedExecutor
from strata_jax.executors.simulated_storage import SimulatedStorage
from strata_jax.executors.timeline import CostTimeline, InstantTimeline
from strata_jax.profile import Profile
from strata_jax.scheduler.views import Costs
from strata_jax.systems import SystemConfig
from strata_jax.workloads.request import Request
from strata_jax.workloads.workload import Workload, output_tokens

INITIAL_CACHES = ("cold", "host_warm", "device_warm")

# Budgets that all systems of a comparison share. The cap on requests in flight is the paper's; the
# chunk budget is what public systems default to on this class of GPU.
SERVING = ServingConfig(
  requests_in_flight=128, running_requests=128, batch_requests=16, step_tokens=8192,
  decode_steps=64,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSizes:
  """Tokens of the pools; 0: what the profile's memory leaves beside the weights."""

  device_tokens: int = 0  # room in the device pool; 0: what the profile leaves
  host_tokens: int = 0  # room in the host pool; 0: what the profile leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedRun:
  """What a simulation leaves behind."""

  result: metrics.ServingResult
  costs: CostModel
  timeline: CostTimeline
  controller: CacheController
  storage: SimulatedStorage | None = None

  def summary(self, **options: Any) -> dict[str, Any]:
    """`metrics.summarize`, with the link's use."""
    elapsed_s = self.result.ended_s
    token_bytes = self.costs.profile.kv_bytes_token
    return {
      **metrics.summarize(self.result, token_bytes=int(token_bytes), **options),
      "link_busy_fraction": self.timeline.down.busy_s / elapsed_s if elapsed_s else 0.0,
      "compute_busy_fraction": self.timeline.compute_busy_s / elapsed_s if elapsed_s else 0.0,
      **({} if self.storage is None else self._storage_summary(self.storage)),
    }

  def _storage_summary(self, storage: SimulatedStorage) -> dict[str, Any]:
    stats = self.controller.stats
    return {
      "stored_pages": len(storage),
      "storage_read_bytes": storage.read_bytes,
      "storage_written_bytes": storage.written_bytes,
      "prefetched_tokens": stats.prefetched_tokens,
      "cut_prefetches": stats.cut_prefetches,
      "shortened_prefetches": stats.shortened_prefetches,
    }


def find_profile(hardware: str, model: str, folder: pathlib.Path | str = profile.FOLDER) -> Profile:
  """`<hardware>_<model>`, or the one with its degree of tensor parallelism behind it.

  Raises ValueError with the profiles there are in the folder.
  """
  wanted = f"{hardware}_{model}"
  known = profile.names(folder)
  found = [n for n in known if n == wanted or n.startswith(f"{wanted}_tp")]
  if not found:
    raise ValueError(
      f"hardware, model: expected <hardware>_<model> to be one of {', '.join(known)},"
      f" got {hardware!r} and {model!r}"
    )
  return profile.load(found[0], folder)


def system_with(system: SystemConfig, overrides: Mapping[str, Any]) -> SystemConfig:
  """The system with fields replaced; `scheduler.FIELD` names a field of its scheduler.

  Raises ValueError for an unknown field or an impossible value.
  """
  own = {key: value for key, value in overrides.items() if not key.startswith("scheduler.")}
  nested = {key.removeprefix("scheduler."): value for key, value in overrides.items()
            if key.startswith("scheduler.")}  # fmt: skip
  for config, fields in ((system, own), (system.scheduler, nested)):
    known = {field.name for field in dataclasses.fields(config)}
    unknown = sorted(set(fields) - known)
    if unknown:
      raise ValueError(f"{type(config).__name__}: expected fields that exist, got {unknown}")
  scheduler = dataclasses.replace(system.scheduler, **nested)
  return dataclasses.replace(system, scheduler=scheduler, **own)


def io_config(system: SystemConfig) -> IoConfig:
  """How the system moves pages."""
  return IoConfig(
    page_size=system.page_size,
    load_backend=system.load_backend,
    store_backend=system.store_backend,
    separate_kv_copies=system.separate_kv_copies,
    capped_blocks=system.capped_blocks,
    overlap=system.overlap,
    load_is_free=system.load_is_free,
  )


def cache_config(
  system: SystemConfig, machine: Profile, workload: Workload, pools: PoolSizes
) -> CacheConfig:
  """The pools of a system on a machine."""
  device_tokens = pools.device_tokens or machine.device_kv_tokens
  if system.ideal == "all_on_device":
    # Every page that the workload could ever make, each request's last page partly filled.
    made = workload.input_tokens + workload.output_tokens
    device_tokens = max(device_tokens, made + system.page_size * len(workload.requests))
  return CacheConfig(
    page_size=system.page_size,
    device_tokens=device_tokens,
    host_tokens=(pools.host_tokens or machine.host_kv_tokens) if system.host else 0,
    write_policy=system.write_policy,
    selective_threshold=system.selective_threshold,
    enabled=system.prefix_cache,
  )


def storage_config(system: SystemConfig) -> StorageConfig | None:
  """The storage tier of a system; None where it has none."""
  if system.storage == "none" or not system.host:
    return None
  return StorageConfig(
    min_prefetch_tokens=max(1, system.min_prefetch_tokens),
    prefetch_limit_s=system.prefetch_timeout_s,
    prefetch_base_s=system.prefetch_timeout_base_s,
    prefetch_s_per_1024_tokens=system.prefetch_timeout_s_per_1024_tokens,
  )


def simulate(
  workload: Workload,
  machine: Profile,
  system: SystemConfig,
  *,
  policy: str | None = None,
  serving: ServingConfig = SERVING,
  pools: PoolSizes = PoolSizes(),
  initial_cache: str = "cold",
  recorder: serving_loop.Recorder | None = None,
  progress: serving_loop.Progress | None = None,
  check: bool = True,
  shown_costs: Costs | None = None,
  whole_decodes: bool = False,
  buckets: Buckets | None = None,
) -> SimulatedRun:
  """Serves the workload on a virtual clock.

  Args:
    workload: every request has forced output ids.
    machine: the profile.
    system: cache, scheduler and I/O.
    policy: instead of the system's: a name, FILE.py:NAME or module:NAME.
    serving: budgets.
    pools: sizes, where they are not to be the profile's.
    initial_cache: "cold"; "host_warm": the workload's contexts are in host memory and the device is
      empty; "device_warm": as after they were all asked about once.
    recorder: called with every view and plan.
    progress: called when a request is over.
    check: raise CheckError where the run breaks a law that every run keeps.
    shown_costs: what the policy is shown; None: the profile's.
    buckets: shapes that prefills are padded to, as by a real executor; None: exact ones.
    whole_decodes: no event ends the decode steps of a plan early, as in a real run.

  Raises:
    ValueError: names, sizes or requests that cannot be.
  """
  if initial_cache not in INITIAL_CACHES:
    expected = ", ".join(INITIAL_CACHES)
    raise ValueError(f"initial_cache: expected one of {expected}, got {initial_cache!r}")
  costs = CostModel(machine, io_config(system), buckets)
  cache = cache_config(system, machine, workload, pools)
  scheduler = system.scheduler_config
  chosen = policy_loading.load_policy(policy or system.policy, scheduler)
  longest = max(len(r.prompt_ids) + output_tokens(r) for r in workload.requests)
  storage_tier, storage = storage_config(system), None
  if storage_tier is not None:
    storage = SimulatedStorage(
      machine.storage, page_bytes=machine.kv_bytes_token * system.page_size,
      page_size=system.page_size,
    )  # fmt: skip
  controller = CacheController(
    cache, serving, fingerprint=machine.name, context_tokens=longest,
    costs=costs.costs() if shown_costs is None else shown_costs, storage=storage_tier,
  )  # fmt: skip
  if initial_cache != "cold" and cache.enabled:
    flush_device = initial_cache == "host_warm"
    _warm(controller, workload, chosen, serving, storage, flush_device=flush_device)
  timeline = CostTimeline(costs)
  executor = SimulatedExecutor(
    timeline, storage, whole_decodes=whole_decodes,
    decode_shares=machine.executor.decode_shares, page_size=system.page_size,
  )  # fmt: skip
  result = serving_loop.serve(
    workload.requests,
    controller=controller,
    policy=chosen,
    executor=executor,
    serving=serving,
    recorder=recorder,
    progress=progress,
  )
  run = SimulatedRun(
    result=result, costs=costs, timeline=timeline, controller=controller, storage=storage
  )
  if check:
    simulation_checks.check_run(workload, result, timeline, controller)
  return run


def isolated_ttft_s(workload: Workload, costs: CostModel, serving: ServingConfig) -> float:
  """Mean TTFT of the requests when each runs alone without a cache: the unit of TTFT targets."""
  seconds = [
    math.fsum(
      costs.prefill_s([(min(serving.step_tokens, tokens - start), start)])
      for start in range(0, tokens, serving.step_tokens)
    )
    for tokens in (len(request.prompt_ids) for request in workload.requests)
  ]
  return math.fsum(seconds) / len(seconds)


def _warm(
  controller: CacheController,
  workload: Workload,
  policy: Callable[..., Any],
  serving: ServingConfig,
  storage: SimulatedStorage | None,
  *,
  flush_device: bool,
) -> None:
  """Lets every context through once (or as often as it takes to be backed up) in no time."""
  if not workload.contexts:
    raise ValueError(
      f"initial_cache: expected a workload with shared contexts, got {workload.name}"
    )
  rounds = warm_cache.rounds(controller)
  nothing = np.empty(0, dtype=np.int32)
  for round_ in range(rounds):
    requests = [
      Request(
        request_id=-1 - index - round_ * len(workload.contexts), prompt_ids=context,
        forced_output_ids=nothing, max_new_tokens=0,
      )
      for index, context in enumerate(workload.contexts)
    ]  # fmt: skip
    executor = SimulatedExecutor(InstantTimeline(), storage)
    one_by_one = dataclasses.replace(serving, requests_in_flight=1)
    serving_loop.serve(
      requests, controller=controller, policy=policy, executor=executor, serving=one_by_one
    )
  if storage is not None:
    storage.restart()
  if flush_device:
    warm_cache.flush_device(controller, SimulatedExecutor(InstantTimeline()))
