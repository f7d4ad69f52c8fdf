"""Arrival times for a list of requests. Multi-turn followers keep their think time instead."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from strata_jax.workloads.request import Request
from strata_jax.workloads.workload import Workload

KINDS = ("closed", "poisson", "fixed", "burst", "trace")


def unit_gaps(count: int, seed: int) -> np.ndarray:
  """Unit exponentials by seed, float64 [count]: divided by a rate, the same for every system."""
  return np.random.default_rng([seed, 0x617272]).exponential(1.0, count)


def poisson(workload: Workload, rate_rps: float, seed: int) -> Workload:
  """Arrival i at (sum of the first i + 1 unit exponentials of `seed`) / rate."""
  _check_rate(rate_rps)
  count = sum(1 for request in workload.requests if request.follows is None)
  return _spread(workload, np.cumsum(unit_gaps(count, seed)) / rate_rps)


def fixed(workload: Workload, rate_rps: float) -> Workload:
  """One arrival every 1 / rate seconds, the first at 0."""
  _check_rate(rate_rps)
  count = sum(1 for request in workload.requests if request.follows is None)
  return _spread(workload, np.arange(count) / rate_rps)


def burst(workload: Workload, rate_rps: float, burst_requests: int) -> Workload:
  """`burst_requests` at once, with gaps that keep the mean rate."""
  _check_rate(rate_rps)
  if burst_requests < 1:
    raise ValueError(f"burst_requests: expected an integer >= 1, got {burst_requests}")
  count = sum(1 for request in workload.requests if request.follows is None)
  return _spread(workload, np.arange(count) // burst_requests * (burst_requests / rate_rps))


def closed(workload: Workload) -> Workload:
  """No arrival times: the cap on requests in flight lets them in."""
  return workload.with_requests(
    dataclasses.replace(request, arrival_s=None) for request in workload.requests
  )


def speed_up(workload: Workload, factor: float) -> Workload:
  """Arrivals of a trace, and think times, `factor` times as dense (0.5: twice as slow)."""
  if not factor > 0:
    raise ValueError(f"arrival_speedup: expected a number > 0, got {factor}")
  return workload.with_requests(
    dataclasses.replace(
      request,
      arrival_s=None if request.arrival_s is None else request.arrival_s / factor,
      think_s=request.think_s / factor,
    )
    for request in workload.requests
  )


def _spread(workload: Workload, times_s: Sequence[float] | np.ndarray) -> Workload:
  times = iter(times_s)
  return workload.with_requests(
    request
    if request.follows is not None
    else dataclasses.replace(request, arrival_s=float(next(times)))
    for request in workload.requests
  )


def arrivals_of(requests: Sequence[Request]) -> list[float]:
  """The arrival times of those that have one of their own."""
  return [request.arrival_s for request in requests if request.arrival_s is not None]


def _check_rate(rate_rps: float) -> None:
  if not rate_rps > 0:
    raise ValueError(f"request_rate: expected a number > 0, got {rate_rps}")
