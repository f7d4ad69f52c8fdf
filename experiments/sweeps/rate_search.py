"""Which rate to measure next, until two rates close together bracket a mean TTFT.

A rule without state: what was measured so far says what is missing, so a search can be cut and go
on later. A step is `BRACKET`, squared while the TTFT is far from the target.
"""

import math
from collections.abc import Sequence

from experiments.sweeps import crossing
from experiments.sweeps.crossing import BRACKET, Row

_FAR = 3.0  # a TTFT that differs from the target by more than this factor
_LARGEST = 64.0  # a list that is over before it overloads is not tried any faster, times the start


def next_rate(
  rows: Sequence[Row], start_rps: float, target_s: float, *, largest: float = _LARGEST
) -> float | None:
  """The next rate of one system in one repeat; None: the target is bracketed, or out of reach.

  Args:
    rows: of `points.jsonl`, what was measured so far.
    start_rps: the first guess.
    target_s: the mean TTFT to bracket.
    largest: rates beyond this many times the guess, or below its inverse, are not tried.
  """
  by_rate = {row["rate_rps"]: row for row in rows}
  if not by_rate:
    return start_rps
  good = [rate for rate, row in by_rate.items() if crossing.sustains(row, target_s)]
  low = max(good, default=None)
  high = min([rate for rate in by_rate if low is None or rate > low], default=None)
  if low is None:
    assert high is not None
    row = by_rate[high]
    far = row["lost"] or row["ttft_mean_s"] is None or row["ttft_mean_s"] > _FAR * target_s
    rate = high / (BRACKET**2 if far else BRACKET)
    return _rounded(rate) if rate * largest >= start_rps else None
  if high is None:
    far = by_rate[low]["ttft_mean_s"] * _FAR < target_s
    rate = low * (BRACKET**2 if far else BRACKET)
    return _rounded(rate) if rate <= largest * start_rps else None
  if high / low <= BRACKET * 1.01:
    return None
  return _rounded(math.sqrt(low * high))


def _rounded(rate_rps: float) -> float:
  """Three digits, so that repeats meet the same rates."""
  return float(f"{rate_rps:.3g}")
