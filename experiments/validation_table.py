"""Real points beside simulated ones: errors, their mean, ratios between systems, verdicts."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.sweeps import crossing
from strata_jax import validation

METRICS = (
  "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_mean_s", "output_tokens_per_s",
  "requests_per_s", "device_hit_tokens", "host_hit_tokens", "storage_hit_tokens",
  "computed_tokens", "loaded_tokens", "stall_fraction", "bubble_fraction", "load_gbps",
)  # fmt: skip
_SHARES = ("stall_fraction", "bubble_fraction")  # their errors are differences

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """How far a simulation may be off."""

  throughput_error: float = 0.10  # of output tokens a second, relative
  ttft_error: float = 0.15  # of the mean TTFT, relative
  ratio_error: float = 0.10  # of a ratio between two systems, relative

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      validation.check_number(self, field.name, minimum=0.0)


def point_row(
  names: Mapping[str, Any], real: Mapping[str, Any], simulated: Mapping[str, Any], limits: Limits
) -> Row:
  """A point: both, the errors (simulated / real - 1; of shares: the difference), the verdict.

  Args:
    names: what says which point it is.
    real: its summary.
    simulated: the simulation's.
    limits: of the verdict.
  """
  error = {name: _error(name, real.get(name), simulated.get(name)) for name in METRICS}
  throughput, ttft = error["output_tokens_per_s"], error["ttft_mean_s"]
  checks = {
    "throughput_ok": throughput is not None and abs(throughput) <= limits.throughput_error,
    "ttft_ok": ttft is not None and abs(ttft) <= limits.ttft_error,
  }
  return {
    **names,
    "real": {name: real.get(name) for name in METRICS},
    "simulated": {name: simulated.get(name) for name in METRICS},
    "error": error,
    **checks,
    "ok": all(checks.values()),
  }


def bias(rows: Sequence[Row]) -> dict[str, float | None]:
  """The mean of the signed errors, by metric."""
  return {name: _mean([row["error"][name] for row in rows]) for name in METRICS}


def absolute(rows: Sequence[Row]) -> dict[str, float | None]:
  """The mean of the errors without their sign, by metric."""
  errors = lambda name: [row["error"][name] for row in rows]
  return {
    name: _mean([None if value is None else abs(value) for value in errors(name)])
    for name in METRICS
  }


def spread(rows: Sequence[Row]) -> list[Row]:
  """How far real repeats of one system and rate are apart: (largest - smallest) / mean."""
  groups: dict[tuple[str, float], list[Row]] = {}
  for row in rows:
    groups.setdefault((row["system"], row["rate_rps"]), []).append(row)
  result = []
  for (system, rate_rps), some in groups.items():
    if len(some) < 2:
      continue
    found = {}
    for side in ("real", "simulated"):
      for name in ("ttft_mean_s", "output_tokens_per_s"):
        values = [row[side][name] for row in some if row[side][name] is not None]
        mean = float(np.mean(values)) if values else 0.0
        found[f"{side}_{name}"] = (max(values) - min(values)) / mean if mean else None
    result.append({"system": system, "rate_rps": rate_rps, "repeats": len(some), **found})
  return result


def ratios(
  real: Sequence[Row], simulated: Sequence[Row], targets_s: Mapping[float, float], baseline: str,
  limits: Limits,
) -> list[Row]:  # fmt: skip
  """Throughput of each system over the baseline's: at equal mean TTFT, and the highest measured.

  Args:
    real: rows as in `points.jsonl`.
    simulated: the same for the simulation.
    targets_s: mean TTFTs by their multiple of T_ref.
    baseline: a system.
    limits: of the verdict.
  """
  result = []
  tables = [crossing.table(points, targets_s, baseline) for points in (real, simulated)]
  for one, other in zip(*tables, strict=True):
    if one["system"] == baseline:
      continue
    at = f"mean TTFT of {one['t_star_of_t_ref']:g} T_ref"
    values = one["ratio_to_baseline"], other["ratio_to_baseline"]
    result.append(_ratio(one["system"], baseline, at, values, limits))
  highest = [_highest(points) for points in (real, simulated)]
  for system in highest[0]:
    if system != baseline and baseline in highest[0]:
      real_ratio, simulated_ratio = (found[system] / found[baseline] for found in highest)
      values = real_ratio, simulated_ratio
      result.append(_ratio(system, baseline, "highest throughput", values, limits))
  return result


def line(row: Row) -> str:
  """A point for whoever watches: relative errors in percent, of shares the difference."""
  error = row["error"]

  def text(name: str) -> str:
    if error[name] is None:
      return "-"
    return f"{error[name]:+.2f}" if name in _SHARES else f"{error[name]:+.1%}"

  return (
    f"{row['system']} at {row['rate_rps']:g} requests/s, repeat {row['repeat']}"
    f"{' (fitted)' if row['fitted'] else ''}: mean TTFT {text('ttft_mean_s')}, p99"
    f" {text('ttft_p99_s')}, throughput {text('output_tokens_per_s')}, stall"
    f" {text('stall_fraction')}: {'within' if row['ok'] else 'outside'} the limits"
  )


def _ratio(
  system: str, baseline: str, at: str, values: tuple[float | None, float | None], limits: Limits
) -> Row:
  real, simulated = values
  error = _error("ratio", real, simulated)
  ok = None if error is None else abs(error) <= limits.ratio_error
  return {
    "system": system, "baseline": baseline, "at": at, "real": real, "simulated": simulated,
    "error": error, "ok": ok,
  }  # fmt: skip


def _highest(points: Sequence[Row]) -> dict[str, float]:
  """The highest mean throughput of repeats over the rates, by system."""
  groups: dict[str, dict[float, list[float]]] = {}
  for row in points:
    value = row["output_tokens_per_s"] or 0.0
    groups.setdefault(row["system"], {}).setdefault(row["rate_rps"], []).append(value)
  return {
    system: max(float(np.mean(values)) for values in rates.values())
    for system, rates in groups.items()
  }


def _error(name: str, real: float | None, simulated: float | None) -> float | None:
  if real is None or simulated is None:
    return None
  if name in _SHARES:
    return simulated - real
  if not real:
    return 0.0 if not simulated else None
  return simulated / real - 1.0


def _mean(values: Sequence[float | None]) -> float | None:
  known = [value for value in values if value is not None]
  return float(np.mean(known)) if known else None
