"""Runs points: one model, one pair of pools a kind of cache, one executor a way to move pages."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from experiments import executor_flags, flags, measured_costs, run_folder, serve_setup
from experiments.executor_flags import ExecutorConfig, IoNames
from experiments.host_time import HostTimer
from experiments.throughput_plan import Contender, Point
from strata_jax import metrics, policy_loading, serving_loop, warm_cache
from strata_jax.cache_controller import CacheController
from strata_jax.config import CacheConfig, ModelConfig, ServingConfig
from strata_jax.executors.jax_executor import JaxExecutor
from strata_jax.metrics import ServingResult
from strata_jax.models.llama import Params
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import Policy
from strata_jax.scheduler.views import Costs
from strata_jax.workloads import arrivals, folding
from strata_jax.workloads.request import Request
from strata_jax.workloads.workload import Workload

REFERENCE = "fcfs"  # policy of the isolated requests


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
  """What all points have in common."""

  model: ModelConfig
  device_tokens: int
  host_tokens: int
  serving: ServingConfig
  executor: ExecutorConfig
  initial_cache: str
  with_costs: bool  # policies are shown measured costs
  point_limit_s: float
  seed: int

  def cache(self, contender: Contender) -> CacheConfig:
    """The tiers of a system."""
    system = contender.system
    with flags.usage_errors():
      return CacheConfig(
        page_size=system.page_size,
        device_tokens=self.device_tokens,
        host_tokens=self.host_tokens if system.host else 0,
        write_policy=system.write_policy,
        selective_threshold=system.selective_threshold,
        enabled=system.prefix_cache,
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
  """A point: what happened, its row, and the rows of its requests and steps."""

  result: ServingResult
  row: dict[str, Any]
  requests: list[dict[str, Any]]
  steps: list[dict[str, Any]]


class Bench:
  """Holds the weights and, for every kind of cache, pools, executors and what is cached."""

  def __init__(
    self,
    config: BenchConfig,
    params: Params,
    workload: Workload,
    contenders: Sequence[Contender],
  ) -> None:
    """Makes nothing yet: pools and programs come with the first point that needs them.

    Args:
      config: of all points.
      params: the weights.
      workload: with ids of any size and without arrival times; every point folds it anew.
      contenders: the systems, all of whose executors are made together.
    """
    self._config = config
    self._params = params
    self._workload = workload
    self._contenders = contenders
    self._policies = {
      one.label: policy_loading.load_policy(one.policy_name, one.system.scheduler_config)
      for one in contenders
    }
    self._tiers: dict[CacheConfig, _Tiers] = {}
    self.costs: dict[str, Costs] = {}

  @property
  def requests(self) -> int:
    """Requests of a point."""
    return len(self._workload.requests)

  @property
  def contexts(self) -> int:
    """Contexts that the workload's questions are about."""
    return len(self._workload.contexts)

  def reference_ttft_s(self, contender: Contender, count: int) -> float:
    """Mean TTFT of `count` requests that come alone and find no cache, after one that warms up.

    They are about different contexts as far as there are so many.
    """
    config, tiers = self._config, self._tiers_of(contender)
    folded = folding.fold(self._workload, config.model.vocab_size)
    different = serve_setup.visits(folded.requests, count + 1)
    requests = [
      dataclasses.replace(different[i % len(different)], request_id=i) for i in range(count + 1)
    ]
    executor, _ = tiers.executor(executor_flags.io_of(contender.system))
    result = self._alone(tiers, executor, requests)
    times = [r.ttft_s for r in result.requests[1:] if r.ttft_s is not None]
    return sum(times) / len(times)

  def run(self, point: Point, *, checked_requests: int = 0) -> Measured:
    """Brings the cache into its initial state and serves the workload at the point's rate.

    Of what read cached pages, so many requests are served again afterwards, alone and without
    cache: their outputs have to be the same.
    """
    began_s = time.monotonic()
    (contender,) = [c for c in self._contenders if c.label == point.label]
    config, io = self._config, executor_flags.io_of(contender.system)
    tiers = self._tiers_of(contender)
    executor, costs = tiers.executor(io)
    policy = self._policies[point.label]
    contexts = folding.fold(self._workload, config.model.vocab_size).contexts
    warmed = tiers.prepare(contexts, policy, config.initial_cache)
    requests = self._requests(point)
    controller = tiers.warm
    controller.costs = costs
    timer = HostTimer(executor)
    compiled_before = executor.recompiles
    prepared_s = time.monotonic() - began_s
    with run_folder.Progress(len(requests), str(point)) as bar:
      result = serving_loop.serve(
        requests, controller=controller, policy=policy, executor=timer, serving=config.serving,
        progress=lambda done, _: bar.update(done),
      )  # fmt: skip
    checks = self._check(tiers, executor, requests, result, checked_requests)
    return Measured(
      result=result,
      row={
        **_names(point, contender, io),
        **self._sizes(tiers.cache, contexts),
        "warmed_contexts": warmed,
        **_summary(result, requests, config),
        **timer.summary(),
        "costs": costs,
        "decode_shares": executor.decode_shares,
        "recompiles": executor.recompiles - compiled_before,
        **checks,
        "prepare_s": prepared_s,
        "wall_s": time.monotonic() - began_s,
      },
      requests=[_request_row(record) for record in result.requests],
      steps=_step_rows(result, timer),
    )

  def _alone(
    self, tiers: "_Tiers", executor: JaxExecutor, requests: Sequence[Request]
  ) -> ServingResult:
    """Serves requests one after the other without a cache; nothing may be cached on the device."""
    return serving_loop.serve(
      requests,
      controller=tiers.controller(cached=False),
      policy=policy_loading.load_policy(REFERENCE, SchedulerConfig()),
      executor=executor,
      serving=dataclasses.replace(self._config.serving, requests_in_flight=1),
    )

  def _check(
    self, tiers: "_Tiers", executor: JaxExecutor, requests: Sequence[Request],
    result: ServingResult, count: int,
  ) -> dict[str, Any]:  # fmt: skip
    """Serves some requests again without cache and compares; the device is empty then."""
    hits = [
      index
      for index, record in enumerate(result.requests)
      if record.outcome == "finished" and record.device_hit_tokens + record.host_hit_tokens
    ]
    chosen = hits[:: max(1, len(hits) // count)][:count] if count else []
    if not chosen:
      return {"checked_requests": 0, "outputs_identical": None, "different_requests": []}
    warm_cache.flush_device(tiers.warm, executor)
    again = [
      dataclasses.replace(requests[index], arrival_s=None, abort_s=None, follows=None)
      for index in chosen
    ]
    alone = self._alone(tiers, executor, again)
    identical, different = metrics.identical_outputs(
      [result.requests[index] for index in chosen], alone.requests
    )
    return {
      "checked_requests": len(chosen),
      "outputs_identical": identical,
      "different_requests": different,
    }

  def _requests(self, point: Point) -> list[Request]:
    """The workload with the point's own questions and its repeat's arrivals."""
    config = self._config
    found = folding.fold(self._workload, config.model.vocab_size, tail_stream=point.seed)
    found = arrivals.poisson(found, point.rate_rps, config.seed + point.repeat)
    return [_cut_at(config.point_limit_s, request) for request in found.requests]

  def _tiers_of(self, contender: Contender) -> "_Tiers":
    cache = self._config.cache(contender)
    if cache not in self._tiers:
      ways = {
        executor_flags.io_of(other.system): None
        for other in self._contenders
        if self._config.cache(other) == cache
      }
      longest = max(len(r.prompt_ids) + r.max_new_tokens for r in self._workload.requests)
      self._tiers[cache] = _Tiers(self._config, self._params, cache, tuple(ways), longest)
      for io, costs in self._tiers[cache].costs.items():
        self.costs[f"{io.load}/{io.store}/{io.overlap}, pages of {cache.page_size}"] = costs
    return self._tiers[cache]

  def _sizes(self, cache: CacheConfig, contexts: Sequence[Any]) -> dict[str, Any]:
    working_set = sum(len(context) for context in contexts)
    return {
      "page_size": cache.page_size,
      "device_tokens": cache.device_tokens,
      "host_tokens": cache.host_tokens,
      "working_set_tokens": working_set,
      "device_of_working_set": cache.device_tokens / working_set if working_set else None,
      "host_of_working_set": cache.host_tokens / working_set if working_set else None,
    }


class _Tiers:
  """Pools of one kind of cache, the executors that take turns at them, and what they hold.

  Systems with equal caches share what is cached: it does not depend on how they move or schedule.
  """

  def __init__(
    self,
    config: BenchConfig,
    params: Params,
    cache: CacheConfig,
    ways: Sequence[IoNames],
    longest: int,
  ) -> None:
    self.cache = cache
    self._config = config
    self._executors: dict[IoNames, JaxExecutor] = {}
    self.costs: dict[IoNames, Costs] = {}
    pools = None
    for io in ways:
      run_folder.say(f"pages of {cache.page_size}: {io.load} loads, {io.store} stores")
      with flags.usage_errors(), serve_setup.enough_memory(cache):
        executor = executor_flags.make(
          config.model, params, cache, config.serving, config.executor, io,
          context_tokens=longest, pools=pools,
        )  # fmt: skip
      serve_setup.warm_up(executor)
      self.costs[io] = _costs(executor, cache) if config.with_costs else Costs()
      self._executors[io] = executor
      self._holder = executor
      if io != ways[-1]:
        pools = executor.take_pools()
    self.warm = self.controller()

  def controller(self, *, cached: bool = True) -> CacheController:
    """An empty cache."""
    config = self._config
    cache = self.cache if cached else dataclasses.replace(self.cache, enabled=False)
    return CacheController(
      cache, config.serving, fingerprint=config.model.name,
      context_tokens=config.model.context_tokens,
    )  # fmt: skip

  def executor(self, io: IoNames) -> tuple[JaxExecutor, Costs]:
    """The executor for a way to move pages, which has the pools now, and its costs."""
    wanted = self._executors[io]
    if wanted is not self._holder:
      wanted.give_pools(self._holder.take_pools())
      self._holder = wanted
    return wanted, self.costs[io]

  def prepare(self, contexts: Sequence[Any], policy: Policy, initial_cache: str) -> int:
    """The initial state of a point; says how many contexts had to be brought to the host.

    Raises UsageError when the host cannot hold all contexts.
    """
    cache, executor = self.cache, self._holder
    if initial_cache == "cold" or not (cache.host_pages and cache.enabled):
      self.warm.reset()
      return 0
    warm_cache.flush_device(self.warm, executor)
    missing = warm_cache.missing_on_host(self.warm, contexts)
    brought = len(missing)
    while missing:
      run_folder.say(f"pages of {cache.page_size}: brings {len(missing)} contexts to the host")
      for _ in range(warm_cache.rounds(self.warm)):
        warm_cache.ask_once(
          missing, controller=self.warm, policy=policy, executor=executor,
          serving=self._config.serving,
        )  # fmt: skip
      warm_cache.flush_device(self.warm, executor)
      # A small device pool lets go of pages whose backup has not begun: those come again.
      left = warm_cache.missing_on_host(self.warm, contexts)
      if len(left) >= len(missing):
        raise flags.UsageError(
          f"--host_tokens: expected room for all contexts, got {cache.host_tokens} and {len(left)} "
          f"of {len(contexts)} contexts that did not stay"
        )
      missing = left
    return brought


def _costs(executor: JaxExecutor, cache: CacheConfig) -> Costs:
  """Timed on pools that hold nothing yet."""
  buckets = executor.buckets
  return measured_costs.measure(
    executor,
    page_size=cache.page_size,
    device_pages=cache.device_pages,
    host_pages=cache.host_pages,
    chunk_tokens=buckets.chunk_tokens[-1],
    context_tokens=buckets.table_pages * cache.page_size,
    read_tokens=cache.page_size,
  )


def _cut_at(limit_s: float, request: Request) -> Request:
  """The request with a client that gives up when the point's time is over."""
  if request.arrival_s is None:  # follows another one
    return dataclasses.replace(request, abort_s=limit_s)
  arrival_s = min(request.arrival_s, limit_s)
  return dataclasses.replace(request, arrival_s=arrival_s, abort_s=limit_s - arrival_s)


def _names(point: Point, contender: Contender, io: IoNames) -> dict[str, Any]:
  return {
    "system": point.label,
    "preset": contender.system.name,
    "policy": contender.policy_name,
    "policy_digest": contender.policy_digest,
    "load_io": io.load,
    "store_io": io.store,
    "overlap": io.overlap,
    "rate_rps": point.rate_rps,
    "repeat": point.repeat,
  }


def _summary(
  result: ServingResult, requests: Sequence[Request], config: BenchConfig
) -> dict[str, Any]:
  times = arrivals.arrivals_of(requests)
  token_bytes = config.model.page_layout(1).token_bytes
  summary = metrics.summarize(result, token_bytes=token_bytes)
  exact = all(
    len(record.output_ids) == request.max_new_tokens
    for record, request in zip(result.requests, requests, strict=True)
    if record.outcome == "finished"
  )
  return {
    **summary,
    "arrival_span_s": max(times) - min(times),
    "lost": summary["refused"] + summary["aborted"],
    "exact_output_lengths": exact,
  }


def _request_row(record: metrics.RequestRecord) -> dict[str, Any]:
  row = record.row()
  del row["output_ids"], row["near_ties"]
  return row


def _step_rows(result: ServingResult, timer: HostTimer) -> list[dict[str, Any]]:
  rows = []
  for step in result.steps:
    times = timer.times.get(step.step_id)
    host = {} if times is None else {f"host_{name}": value for name, value in
                                     times._asdict().items()}  # fmt: skip
    rows.append({**step._asdict(), **host})
  return rows
