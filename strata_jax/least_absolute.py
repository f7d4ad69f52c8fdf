"""Fits that outliers do not bend: least absolute relative errors. NumPy only."""

from collections.abc import Callable

import numpy as np

_ROUNDS = 16
_PASSES = 3
_GOLDEN = (5**0.5 - 1) / 2


def fit(features: np.ndarray, measured: np.ndarray, known: np.ndarray | float = 0.0) -> np.ndarray:
  """Coefficients >= 0 that minimise the sum of `errors` of features @ coefficients + known.

  What an error is relative to depends on the prediction: it is fitted in a few passes. In each,
  iteratively reweighted least squares with a shrinking floor under the residuals; a coefficient
  that comes out negative is set to 0 and the others are fitted again.

  Args:
    features: float64 [rows, columns].
    measured: float64 [rows], > 0.
    known: float64 [rows], what is added to the features' part.

  Returns:
    float64 [columns].

  Source: Schlossmacher, An Iterative Technique for Absolute Deviations Curve Fitting, JASA 1973.
  """
  scale = np.maximum(measured, 0.5 * np.median(measured))
  best = np.zeros(features.shape[1])
  for _ in range(_PASSES):
    best = _positive(features / scale[:, None], (measured - known) / scale)
    scale = np.maximum(measured, features @ best + known)
  return best


def errors(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
  """|predicted - measured| over the larger of both, float64 [rows]: none counts more than 1."""
  return np.abs(predicted - measured) / np.maximum(np.maximum(predicted, measured), 1e-12)


def _positive(features: np.ndarray, target: np.ndarray) -> np.ndarray:
  result = np.zeros(features.shape[1])
  active = np.abs(features).max(axis=0, initial=0.0) > 0
  while active.any():
    found = _free(features[:, active], target)
    contribution = found * np.abs(features[:, active]).mean(axis=0)
    if contribution.min() >= -1e-12:
      result[active] = np.maximum(found, 0.0)
      break
    active[np.flatnonzero(active)[contribution.argmin()]] = False
  return result


def _free(features: np.ndarray, target: np.ndarray) -> np.ndarray:
  units = np.abs(features).max(axis=0)
  scaled = features / units
  weights = np.ones(len(target))
  found = np.zeros(features.shape[1])
  for round_ in range(_ROUNDS):
    weighted = scaled.T * weights
    matrix = weighted @ scaled
    matrix.flat[:: len(matrix) + 1] *= 1 + 1e-12  # equal columns share their part
    found = np.linalg.solve(matrix, weighted @ target)
    residuals = np.abs(scaled @ found - target)
    floor = max(1e-9, 0.1 * 0.35**round_)
    weights = 1.0 / np.maximum(residuals, floor)
  return found / units


def weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
  """The value that minimises sum weights * |value - values|; both float64 [rows]."""
  order = np.argsort(values)
  total = np.cumsum(weights[order])
  return float(values[order][np.searchsorted(total, 0.5 * total[-1])])


def minimize(
  loss: Callable[[float], float], low: float, high: float, *, grid: int = 12, rounds: int = 30
) -> tuple[float, float]:
  """The smallest loss on [low, high]: the best of a grid, then golden sections around it.

  Returns:
    Where it is, and the loss there.
  """
  points = np.linspace(low, high, grid)
  losses = [loss(float(point)) for point in points]
  best = int(np.argmin(losses))
  a, b = float(points[max(best - 1, 0)]), float(points[min(best + 1, grid - 1)])
  c, d = b - _GOLDEN * (b - a), a + _GOLDEN * (b - a)
  at_c, at_d = loss(c), loss(d)
  for _ in range(rounds):
    if at_c < at_d:
      b, d, at_d = d, c, at_c
      c = b - _GOLDEN * (b - a)
      at_c = loss(c)
    else:
      a, c, at_c = c, d, at_d
      d = a + _GOLDEN * (b - a)
      at_d = loss(d)
  found = [(losses[best], float(points[best])), (at_c, c), (at_d, d)]
  value, place = min(found)
  return place, value
