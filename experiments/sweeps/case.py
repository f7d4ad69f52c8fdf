"""One simulated setting, as plain data, and how it is run. Used by every sweep."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from strata_jax import simulation as sim
from strata_jax import systems
from strata_jax.scheduler.views import SchedulerView, StepPlan
from strata_jax.workloads import arrivals, synthetic
from strata_jax.workloads.workload import Workload

_LEAST = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """What a run depends on. `overrides`: system fields; `scheduler.FIELD` for its scheduler's."""

  system: str
  policy: str | None = None  # instead of the system's: a name, FILE.py:NAME or module:NAME
  overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  workload: str = "loogle_like"
  limit: int | None = None
  hardware: str = "h200"
  model: str = "llama31_8b"
  initial_cache: str = "host_warm"
  device_tokens: int = 0
  host_tokens: int = 0
  serving: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  seed: int = 0

  def to_json(self) -> dict[str, Any]:
    """As plain values, defaults included."""
    return dataclasses.asdict(self)


class Overloaded(Exception):
  """A run was given up: its mean TTFT is beyond the limit whatever comes.

  `ttft_mean_s`: what it would have been, about.
  """

  def __init__(self, span_s: float, ttft_mean_s: float) -> None:
    super().__init__("the run was given up")
    self.span_s = span_s
    self.ttft_mean_s = ttft_mean_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
  """A case at one arrival rate; None: closed loop at the cap on requests in flight."""

  rate_rps: float | None
  ttft_mean_s: float  # a lower bound where `given_up`
  given_up: bool
  drain_s: float
  span_s: float  # from the first to the last arrival
  lost: int  # refused and aborted requests
  summary: Mapping[str, Any]
  ttft_guess_s: float | None = None  # where `given_up`: about what the mean would have been

  def sustains(self, ttft_s: float) -> bool:
    """Mean TTFT within the target, nobody lost, and drained within 3 targets or 5 % of the span."""
    in_time = self.drain_s <= self._drain_limit_s(ttft_s)
    return not self.given_up and not self.lost and in_time and self.ttft_mean_s <= ttft_s

  def excess(self, ttft_s: float) -> float:
    """How far from sustaining the target: the log of what exceeds its limit most, over that limit.

    At most 0 if sustained, above 0 if not; inf where somebody was lost.
    """
    if self.lost:
      return math.inf
    ttft_mean_s = self.ttft_mean_s
    if self.ttft_guess_s is not None:
      ttft_mean_s = max(ttft_mean_s, self.ttft_guess_s)
    over = max(ttft_mean_s / ttft_s, self.drain_s / self._drain_limit_s(ttft_s), _LEAST)
    return max(math.log(over), _LEAST) if self.given_up else math.log(over)

  def _drain_limit_s(self, ttft_s: float) -> float:
    return max(3 * ttft_s, 0.05 * self.span_s)


def workload_of(case: Case) -> Workload:
  """The case's request list, without arrival times. The last two lists are kept."""
  return _workload(case.workload, case.seed, case.limit)


def reference_ttft_s(case: Case) -> float:
  """Mean TTFT of isolated requests without cache."""
  setup = _setup(case)
  return sim.isolated_ttft_s(workload_of(case), setup.costs, setup.serving)


def simulate(
  case: Case, rate_rps: float | None, *, give_up_ttft_s: float | None = None
) -> tuple[sim.SimulatedRun, float]:
  """The run, and the seconds from the first to the last arrival. Raises Overloaded."""
  setup = _setup(case)
  workload = workload_of(case)
  if rate_rps is None:
    workload = arrivals.closed(workload)
  else:
    workload = arrivals.poisson(workload, rate_rps, case.seed)
  times = arrivals.arrivals_of(workload.requests)
  watch = None
  if give_up_ttft_s is not None and len(times) == len(workload.requests):
    watch = _Watch(times, give_up_ttft_s)
  simulated = sim.simulate(
    workload, setup.profile, setup.system, policy=case.policy, serving=setup.serving,
    pools=sim.PoolSizes(device_tokens=case.device_tokens, host_tokens=case.host_tokens),
    initial_cache=case.initial_cache, recorder=watch.record if watch else None,
    progress=watch.progress if watch else None,
  )  # fmt: skip
  return simulated, max(times) - min(times) if times else 0.0


def run(case: Case, rate_rps: float | None, *, give_up_ttft_s: float | None = None) -> Point:
  """Runs a case: Poisson arrivals at a rate, or closed loop.

  A run whose mean TTFT is sure to exceed `give_up_ttft_s` is cut short.
  """
  try:
    simulated, span_s = simulate(case, rate_rps, give_up_ttft_s=give_up_ttft_s)
  except Overloaded as error:
    assert give_up_ttft_s is not None
    return Point(
      rate_rps=rate_rps, ttft_mean_s=give_up_ttft_s, given_up=True, drain_s=0.0,
      span_s=error.span_s, lost=0, summary={}, ttft_guess_s=error.ttft_mean_s,
    )  # fmt: skip
  summary = simulated.summary()
  return Point(
    rate_rps=rate_rps, ttft_mean_s=summary["ttft_mean_s"] or 0.0, given_up=False,
    drain_s=summary["drain_s"], span_s=span_s, lost=summary["refused"] + summary["aborted"],
    summary=summary,
  )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Setup:
  profile: sim.Profile
  system: systems.SystemConfig
  serving: sim.ServingConfig
  costs: sim.CostModel


def _setup(case: Case) -> _Setup:
  profile = sim.find_profile(case.hardware, case.model)
  system = sim.system_with(systems.system(case.system), case.overrides)
  serving = dataclasses.replace(sim.SERVING, **case.serving)
  costs = sim.CostModel(profile, sim.io_config(system))
  return _Setup(profile=profile, system=system, serving=serving, costs=costs)


@functools.lru_cache(maxsize=2)
def _workload(name: str, seed: int, limit: int | None) -> Workload:
  found = synthetic.GENERATORS[name](seed)
  return found.with_requests(found.requests[:limit])


class _Watch:
  """Gives a run up once its requests have waited too long in sum.

  Adds up, between plans, the requests that arrived by the earlier plan and were not admitted by the
  later one: no more than the sum of all TTFTs.
  """

  def __init__(self, arrivals_s: list[float], ttft_s: float) -> None:
    self._arrivals_s = arrivals_s
    self._limit_s = ttft_s * len(arrivals_s)
    self._waited_s = 0.0
    self._over = 0
    self._admitted = 0  # a preempted request stays admitted
    self._arrived = 0
    self._last_s = 0.0

  def progress(self, over: int, total: int) -> None:
    self._over = over

  def record(self, view: SchedulerView, plan: StepPlan) -> None:
    now_s = view.now_s
    self._admitted = max(self._admitted, self._over + len(view.running))
    self._waited_s += max(0, self._arrived - self._admitted) * (now_s - self._last_s)
    self._last_s = now_s
    while self._arrived < len(self._arrivals_s) and self._arrivals_s[self._arrived] <= now_s:
      self._arrived += 1
    if self._waited_s > self._limit_s:
      raise self._overloaded(now_s)

  def _overloaded(self, now_s: float) -> Overloaded:
    """With the mean wait that goes on as so far, or of a queue that is emptied at the same rate."""
    first_s, count = self._arrivals_s[0], len(self._arrivals_s)
    span_s, passed_s = self._arrivals_s[-1] - first_s, now_s - first_s
    if not self._admitted:
      return Overloaded(span_s, math.inf)
    steady_s = self._waited_s / count * max(1.0, span_s / passed_s)
    queued_s = 0.5 * (count * passed_s / self._admitted - span_s)
    return Overloaded(span_s, max(steady_s, queued_s))
