"""Throughput at equal mean TTFT, the measure of most sweeps.

Arrival i of a fixed request list comes at (sum of the first unit exponentials by seed) / rate, the
same for all systems. TTFT counts from the scheduled arrival, the mean is over all requests. The
highest rate that is sustained with a mean TTFT of at most T* is found to 2 % (`bracketing`);
throughput is all output tokens over (last completion - first arrival) there. T* is a multiple of
T_ref, the mean TTFT of isolated requests without cache.

A list of requests may be over before a fast system is overloaded: then the fastest rate that is
tried, `bracketing.HIGHEST` times the closed loop's, is still sustained. Such a point is not
`bracketed`, its mean TTFT lies below T*, and tables say so in their verdict.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.sweeps import bracketing
from experiments.sweeps import case as cases
from experiments.sweeps.case import Case, Point

HEADLINE = 5.0  # T* / T_ref
TARGETS = (1.0, 2.0, 5.0, 10.0)
TOLERANCE = bracketing.TOLERANCE


def measure(config: Mapping[str, Any]) -> dict[str, Any]:
  """A cell of a sweep: `case` as plain values and `targets`; without targets the peak alone."""
  case = Case(**config["case"])
  targets: Sequence[float] = config["targets"]
  reference_s = cases.reference_ttft_s(case)
  peak = cases.run(case, None)
  peak_rps = peak.summary["requests_per_s"]
  found: dict[str, Any] = {
    "reference_ttft_s": reference_s,
    "peak_output_tokens_per_s": peak.summary["output_tokens_per_s"],
    "peak": _kept(peak.summary),
    "at": {},
  }
  search = _Search(case, peak_rps, len(cases.workload_of(case).requests))
  # From the largest target down: what a run showed for one target narrows the next.
  for target in sorted(targets, reverse=True):
    point = search.highest(target * reference_s)
    found["at"][f"{target:g}"] = None if point is None else {
      "rate_rps": point.rate_rps,
      "bracketed": search.brackets(target * reference_s),
      "output_tokens_per_s": point.summary["output_tokens_per_s"],
      **_kept(point.summary),
    }  # fmt: skip
  found["runs"] = search.runs + 1
  return found


class _Search:
  """Tries rates until a target is bracketed; every rate is run once and serves all targets."""

  def __init__(self, case: Case, peak_rps: float, requests: int = 0) -> None:
    """Takes the closed loop's rate, and how many requests a run has (0: nothing is predicted)."""
    self._case = case
    self._peak_rps = peak_rps
    self._requests = requests
    self.points: dict[float, Point] = {}
    self.runs = 0

  def highest(self, ttft_s: float) -> Point | None:
    """The point of the highest sustained rate; None when none down to a 64th of the peak is."""
    steps = 0
    widths: list[float] = []
    while True:
      trials = self._trials(ttft_s)
      low, high = bracketing.bracket(trials)
      if low is not None and high is not None:
        widths.append(math.log(high.rate_rps / low.rate_rps))
      rate_rps = bracketing.next_rate(
        trials, peak_rps=self._peak_rps, ttft_s=ttft_s, requests=self._requests,
        steps=steps, widths=widths,
      )  # fmt: skip
      if rate_rps is None:
        return None if low is None else self.points[low.rate_rps]
      if trials and not widths:
        steps += 1
      # A run that is sure to fail is cut short, so what is known of it holds for this target only.
      self.points[rate_rps] = cases.run(self._case, rate_rps, give_up_ttft_s=ttft_s)
      self.runs += 1

  def brackets(self, ttft_s: float) -> bool:
    """Whether rates on both sides of the target were tried."""
    return None not in bracketing.bracket(self._trials(ttft_s))

  def _trials(self, ttft_s: float) -> list[bracketing.Trial]:
    return [
      bracketing.Trial(
        rate_rps=rate_rps, sustained=point.sustains(ttft_s), excess=point.excess(ttft_s)
      )
      for rate_rps, point in self.points.items()
      if not (point.given_up and point.ttft_mean_s < ttft_s)  # it may be sustained for this one
    ]


_KEPT = (
  "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "requests_per_s",
  "hit_ratio", "stall_fraction", "bubble_fraction", "load_gbps", "loaded_tokens",
  "computed_tokens", "device_hit_tokens", "host_hit_tokens", "delay_hit_tokens",
  "bundle_hit_tokens", "deferred", "postponed", "preempted", "longest_wait_rounds",
  "jain_fairness", "link_busy_fraction", "compute_busy_fraction",
)  # fmt: skip


def _kept(summary: Mapping[str, Any]) -> dict[str, Any]:
  return {key: summary[key] for key in _KEPT}
