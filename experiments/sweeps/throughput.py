"""Throughput at equal mean TTFT, the measure of most sweeps.

Arrival i of a fixed request list comes at (sum of the first unit exponentials by seed) / rate, the
same for all systems. TTFT counts from the scheduled arrival, the mean is over all requests. The
highest rate that is sustained with a mean TTFT of at most T* is found by bisection to 2 %;
throughput is all output tokens over (last completion - first arrival) there. T* is a multiple of
T_ref, the mean TTFT of isolated requests without cache.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.sweeps import case as cases
from experiments.sweeps.case import Case, Point

HEADLINE = 5.0  # T* / T_ref
TARGETS = (1.0, 2.0, 5.0, 10.0)
TOLERANCE = 1.02
_LOWEST = 1.0 / 64.0  # of the closed loop's rate: nothing sustained above it counts as nothing
_FIRST_STEP = 1.1  # from the closed loop's rate, then its square, and so on
_HIGHEST = 4.0  # of it: a list that is over before it overloads is not tried any faster


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
  search = _Search(case, peak_rps, max(targets, default=0.0) * reference_s)
  # From the largest target down: what a run showed for one target narrows the next.
  for target in sorted(targets, reverse=True):
    point = search.highest(target * reference_s)
    found["at"][f"{target:g}"] = None if point is None else {
      "rate_rps": point.rate_rps,
      "output_tokens_per_s": point.summary["output_tokens_per_s"],
      **_kept(point.summary),
    }  # fmt: skip
  found["runs"] = len(search.points) + 1
  return found


class _Search:
  """Bisection over rates; every rate is run once and serves all targets."""

  def __init__(self, case: Case, peak_rps: float, give_up_s: float) -> None:
    self._case = case
    self._peak_rps = peak_rps
    self._give_up_s = give_up_s
    self.points: dict[float, Point] = {}

  def highest(self, ttft_s: float) -> Point | None:
    """The point of the highest sustained rate; None when none down to a 64th of the peak is."""
    low, high = self._bracket(ttft_s)
    step = _FIRST_STEP
    while low is None:
      rate_rps = high / step
      if rate_rps < _LOWEST * self._peak_rps:
        return None
      if self._point(rate_rps).sustains(ttft_s):
        low = rate_rps
      else:
        high, step = rate_rps, step**2
    while high == math.inf:
      rate_rps = min(low * step, _HIGHEST * self._peak_rps)
      if rate_rps == low:
        return self.points[low]
      if self._point(rate_rps).sustains(ttft_s):
        low, step = rate_rps, step**2
      else:
        high = rate_rps
    while high / low > TOLERANCE:
      rate_rps = math.sqrt(low * high)
      if self._point(rate_rps).sustains(ttft_s):
        low = rate_rps
      else:
        high = rate_rps
    return self.points[low]

  def _bracket(self, ttft_s: float) -> tuple[float | None, float]:
    if not self.points:
      self._point(self._peak_rps)
    good = [rate for rate, point in self.points.items() if point.sustains(ttft_s)]
    low = max(good, default=None)
    bad = [rate for rate, point in self.points.items()
           if not point.sustains(ttft_s) and (low is None or rate > low)]  # fmt: skip
    return low, min(bad, default=math.inf)

  def _point(self, rate_rps: float) -> Point:
    if rate_rps not in self.points:
      self.points[rate_rps] = cases.run(self._case, rate_rps, give_up_ttft_s=self._give_up_s)
    return self.points[rate_rps]


_KEPT = (
  "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "requests_per_s",
  "hit_ratio", "stall_fraction", "bubble_fraction", "load_gbps", "loaded_tokens",
  "computed_tokens", "device_hit_tokens", "host_hit_tokens", "delay_hit_tokens",
  "bundle_hit_tokens", "deferred", "postponed", "preempted", "longest_wait_rounds",
  "jain_fairness", "link_busy_fraction", "compute_busy_fraction",
)  # fmt: skip


def _kept(summary: Mapping[str, Any]) -> dict[str, Any]:
  return {key: summary[key] for key in _KEPT}
