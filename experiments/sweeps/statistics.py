"""Means, paired ratios and 95 % intervals over few seeds."""

import math
from collections.abc import Sequence

# Quantiles 0.975 of Student's t by degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def mean(values: Sequence[float]) -> float | None:
  return math.fsum(values) / len(values) if values else None


def half_width_95(values: Sequence[float]) -> float | None:
  """Half the 95 % interval of the mean; None for fewer than two values."""
  if len(values) < 2:
    return None
  middle = math.fsum(values) / len(values)
  variance = math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1)
  quantile = _T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96
  return quantile * math.sqrt(variance / len(values))


def paired_ratios(
  values: Sequence[float | None], baseline: Sequence[float | None]
) -> list[float] | None:
  """Value over baseline, seed by seed; None when any baseline or value is infeasible."""
  ratios = []
  for value, base in zip(values, baseline, strict=True):
    if value is None or not base:
      return None
    ratios.append(value / base)
  return ratios


def paired_ratio(
  values: Sequence[float | None], baseline: Sequence[float | None]
) -> tuple[float | None, float | None]:
  """The mean of `paired_ratios` and half its 95 % interval; None where there is none."""
  ratios = paired_ratios(values, baseline)
  return (mean(ratios), half_width_95(ratios)) if ratios else (None, None)


def interval(middle: float | None, half: float | None) -> list[float] | None:
  """From `middle - half` to `middle + half`; None where either is."""
  return None if middle is None or half is None else [middle - half, middle + half]


def noise_floor(values: Sequence[float | None]) -> float | None:
  """A/A: one system against itself under the next seed's requests and arrivals.

  Half the 95 % interval of those ratios. Gains that are smaller are not distinguishable. (With the
  same seed the two runs are identical, byte for byte.)
  """
  known = [value for value in values if value]
  if len(known) < 3:
    return None
  shifted = [*known[1:], known[0]]
  return half_width_95([math.log(a / b) for a, b in zip(known, shifted, strict=True)])
