"""Which rate to try next, so that few runs bracket the highest sustained rate to 2 %.

A rule without state: what was tried says what comes next. A target is bracketed once a sustained
rate and one above it that is not are within `TOLERANCE`. On the way there the crossing is
predicted, and rates just below and just above it are tried:

- Without any run: in a queue that is fed faster than it is emptied, N requests arrive over N / rate
  and leave over N / capacity, so their mean wait is N / 2 (1 / capacity - 1 / rate). The capacity
  is the rate of the closed loop.
- With runs on one side only: the same law from the nearest run on, averaged with the line through
  it and another one in logarithms of TTFT and rate.
- With runs on both sides: on that line between the two nearest ones.

Predictions may be wrong, and the TTFT need not rise with the rate: steps to one side grow, and a
bracket that two runs did not halve is halved.
"""

import dataclasses
import math
from collections.abc import Sequence

TOLERANCE = 1.02
LOWEST = 1.0 / 64.0  # of the closed loop's rate: nothing sustained down to it counts as nothing
HIGHEST = 4.0  # of it: a list that is over before it overloads is not tried any faster
_FIRST_STEP = math.log(1.1)  # where nothing is predicted; doubled with each further step
_STEP = 0.99 * math.log(TOLERANCE)  # closes a bracket, rounding or not
_APART = 2.0 * _STEP  # runs closer together say little about the slope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
  """A rate that was tried for a target."""

  rate_rps: float
  sustained: bool
  excess: float  # log of the mean TTFT over the target, about; inf: not known; <= 0 if sustained


def bracket(trials: Sequence[Trial]) -> tuple[Trial | None, Trial | None]:
  """The highest sustained trial, and the lowest one above it (all, if none is) that is not."""
  low = max((t for t in trials if t.sustained), key=lambda t: t.rate_rps, default=None)
  bad = [t for t in trials if not t.sustained and (low is None or t.rate_rps > low.rate_rps)]
  return low, min(bad, key=lambda t: t.rate_rps, default=None)


def next_rate(
  trials: Sequence[Trial],
  *,
  peak_rps: float,
  ttft_s: float,
  requests: int = 0,
  steps: int = 0,
  widths: Sequence[float] = (),
) -> float | None:
  """The rate to try next; None: the target is bracketed, or out of reach to one side.

  Args:
    trials: what was tried so far.
    peak_rps: rate of the closed loop; rates from `LOWEST` to `HIGHEST` of it are tried.
    ttft_s: the target.
    requests: in a run; 0: no law of queues is taken to hold.
    steps: how many rates were tried for this target while only one side of it was known.
    widths: logarithms of the brackets that this target has had, the present one last.
  """
  low, high = bracket(trials)
  if low is not None and high is not None:
    width = math.log(high.rate_rps / low.rate_rps)
    if width <= math.log(TOLERANCE):
      return None
    stuck = len(widths) > 2 and widths[-1] > 0.5 * widths[-3]
    return low.rate_rps * math.exp(_inside(low, high, width, stuck))
  nearest = low or high
  if nearest is None:
    waited = 2.0 * ttft_s / requests if requests else 0.0
    rate_rps = _rate_after(peak_rps, -waited) * math.exp(-0.5 * _STEP if requests else 0.0)
    return min(rate_rps, 1.5 * peak_rps)
  step = _outside(nearest, trials, ttft_s, requests, steps)
  if nearest.sustained:
    most = HIGHEST * peak_rps
    return min(nearest.rate_rps * math.exp(step), most) if nearest.rate_rps < most else None
  least = LOWEST * peak_rps
  return max(nearest.rate_rps * math.exp(-step), least) if nearest.rate_rps > least else None


def _inside(low: Trial, high: Trial, width: float, stuck: bool) -> float:
  """How far above `low` to try, in logarithms."""
  if stuck or width <= 2.0 * _STEP or not math.isfinite(high.excess - low.excess):
    return 0.5 * width
  crossing = width * low.excess / (low.excess - high.excess) if high.excess > low.excess else 0.0
  if min(crossing, width - crossing) > 1.5 * _STEP:
    return crossing - 0.5 * _STEP  # then a step above that
  return _STEP if crossing < 0.5 * width else width - _STEP


def _outside(
  nearest: Trial, trials: Sequence[Trial], ttft_s: float, requests: int, steps: int
) -> float:
  """How far from the nearest trial to try, in logarithms, towards the side that is not known."""
  most = _FIRST_STEP * 2.0**steps
  if not requests or not math.isfinite(nearest.excess):
    return most
  over_s = ttft_s * math.expm1(nearest.excess)
  reached_rps = _rate_after(nearest.rate_rps, 2.0 * over_s / requests)
  distances = [abs(math.log(reached_rps / nearest.rate_rps))]
  slope = _slope(nearest, trials)
  if slope is not None:
    distances.append(abs(nearest.excess) / slope)
  distance = sum(distances) / len(distances) - 0.5 * _STEP
  return min(max(distance, _STEP * 2.0 ** max(0, steps - 1)), 2.0 * most)


def _slope(nearest: Trial, trials: Sequence[Trial]) -> float | None:
  """Of excess over log rate, from the nearest trial to the next one that is far enough from it."""
  known = []
  for trial in trials:
    distance = math.log(trial.rate_rps / nearest.rate_rps)
    if abs(distance) >= _APART and math.isfinite(trial.excess):
      known.append((abs(distance), (trial.excess - nearest.excess) / distance))
  slope = min(known, default=(0.0, 0.0))[1]
  return slope if slope > 0.0 else None


def _rate_after(rate_rps: float, interval_s: float) -> float:
  """The rate whose mean interval is that of `rate_rps` and `interval_s`; four times it at most."""
  return 1.0 / max(1.0 / rate_rps + interval_s, 0.25 / rate_rps)
