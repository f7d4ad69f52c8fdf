"""What a bound of the simulation would reach on the requests of a real run, at equal mean TTFT."""

import dataclasses
import math
from typing import Any

from experiments.measured_run import MeasuredPoint, MeasuredRun
from experiments.sweeps import bracketing
from experiments.sweeps.case import Point
from strata_jax import systems
from strata_jax.profile import Profile


def at_equal_ttft(
  run: MeasuredRun, point: MeasuredPoint, machine: Profile, bound: str, ttft_s: float
) -> dict[str, Any]:
  """The highest rate that a system sustains in the simulation, found to 2 %, and its throughput.

  Args:
    run: the real run.
    point: one of its points, which gives requests, page size, pools and shapes.
    machine: the profile.
    bound: a system by name, with the page size of the point.
    ttft_s: the mean TTFT that the rate must keep.

  Returns:
    `rate_rps`, `output_tokens_per_s` and `mean_ttft_s`; all None where no rate keeps it.

  Raises:
    OSError, ValueError: names, or files that say too little.
  """
  point = dataclasses.replace(point, policy=None)  # the bound has its own
  system = dataclasses.replace(systems.system(bound), page_size=point.system.page_size)
  requests = len(run.workload(point).requests)

  def simulate(rate_rps: float | None) -> Point:
    workload = run.arriving(rate_rps, run.seed + point.repeat)
    found = run.simulate(point, machine, workload, system=system).summary()
    times = [request.arrival_s or 0.0 for request in workload.requests]
    return Point(
      rate_rps=rate_rps, ttft_mean_s=found["ttft_mean_s"] or 0.0, given_up=False,
      drain_s=found["drain_s"], span_s=max(times) - min(times),
      lost=found["refused"] + found["aborted"], summary=found,
    )  # fmt: skip

  peak_rps = simulate(None).summary["requests_per_s"]
  tried: dict[float, Point] = {}
  widths: list[float] = []
  steps = 0
  while True:
    trials = [
      bracketing.Trial(rate_rps=rate, sustained=one.sustains(ttft_s), excess=one.excess(ttft_s))
      for rate, one in tried.items()
    ]
    low, high = bracketing.bracket(trials)
    if low is not None and high is not None:
      widths.append(math.log(high.rate_rps / low.rate_rps))
    rate_rps = bracketing.next_rate(
      trials, peak_rps=peak_rps, ttft_s=ttft_s, requests=requests, steps=steps, widths=widths,
    )  # fmt: skip
    if rate_rps is None:
      break
    steps += bool(trials) and not widths
    tried[rate_rps] = simulate(rate_rps)
  if low is None:
    return {"rate_rps": None, "output_tokens_per_s": None, "mean_ttft_s": None}
  best = tried[low.rate_rps]
  return {
    "rate_rps": low.rate_rps,
    "output_tokens_per_s": best.summary["output_tokens_per_s"],
    "mean_ttft_s": best.ttft_mean_s,
  }
