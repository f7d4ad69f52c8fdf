"""Tables over cells that `throughput.measure` measured: one row a label, over its seeds."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import plots
from experiments.sweeps import statistics, throughput
from experiments.sweeps.case import Case
from experiments.sweeps.types import Cell, Options, Row
from strata_jax import policy_loading

_SUMMARY = (
  "hit_ratio", "stall_fraction", "bubble_fraction", "load_gbps", "loaded_tokens", "deferred",
  "postponed", "delay_hit_tokens", "bundle_hit_tokens", "longest_wait_rounds", "jain_fairness",
)  # fmt: skip
_QUICK_LIMIT, _QUICK_SEEDS = 400, 2


def cells(
  options: Options,
  variants: Mapping[str, Case],
  *,
  seeds: int,
  targets: Sequence[float] = (throughput.HEADLINE,),
) -> list[dict[str, Any]]:
  """One cell a variant and seed, with what the command line says applied.

  Raises ValueError for a policy that cannot be loaded or has no place in the sweep.
  """
  variants = with_policy(options, variants)
  seeds = options.seeds or (_QUICK_SEEDS if options.quick else seeds)
  limit = options.limit or (_QUICK_LIMIT if options.quick else None)
  result = []
  for label, case in variants.items():
    for seed in range(seeds):
      changes: dict[str, Any] = {"seed": seed, "limit": limit}
      if options.workload:
        changes["workload"] = options.workload
      changed = dataclasses.replace(case, **changes)
      result.append({"label": label, "targets": list(targets), "case": changed.to_json()})
  return result


def with_policy(options: Options, variants: Mapping[str, Case]) -> dict[str, Case]:
  """The variants with one of the option's policy behind each that is strata as it stands.

  Thresholds of the scheduler may differ: the policy is given them too.
  """
  if options.policy is None:
    return dict(variants)
  policy_loading.load_policy(options.policy)
  result: dict[str, Case] = {}
  for label, case in variants.items():
    result[label] = case
    changed = [value for value in case.overrides.values() if isinstance(value, bool | str)]
    if case.system == "strata" and not changed:
      own = f"{label} with {policy_name(options.policy)}"
      result[own] = dataclasses.replace(case, policy=options.policy)
  if len(result) == len(variants):
    raise ValueError(f"--policy: expected a sweep with rows of strata, got {', '.join(variants)}")
  return result


def policy_name(spec: str) -> str:
  """FILE.py:NAME without the folders of FILE."""
  place, colon, name = spec.rpartition(":")
  return f"{pathlib.PurePath(place).name}{colon}{name}"


def rows(found: Sequence[Cell], baseline: str | None, *, target: float | None) -> list[Row]:
  """A row a label. `target` None: from the peak of the closed loop.

  Columns: throughput and its ratio to the baseline's, paired by seed (None: infeasible), with 95 %
  intervals; the A/A noise floor of the baseline; the run's own figures. The verdict says where the
  fastest rate that was tried for a seed stays below the target.
  """
  labels = list(dict.fromkeys(str(config["label"]) for config, _ in found))
  points = {label: [point_of(m, target) for c, m in found if c["label"] == label]
            for label in labels}  # fmt: skip
  rates = {label: [_throughput(point) for point in points[label]] for label in labels}
  floor = statistics.noise_floor(rates[baseline]) if baseline in rates else None
  table = []
  for label in labels:
    ratio = half = None
    if baseline in rates:
      ratio, half = statistics.paired_ratio(rates[label], rates[baseline])
    known = [rate for rate in rates[label] if rate is not None]
    feasible = [point for point in points[label] if point is not None]
    told = verdict(ratio, half, floor) if baseline in rates else "no baseline"
    if any(not point.get("bracketed", True) for point in feasible):
      told += "; mean TTFT below the target"
    table.append(
      {
        "label": label,
        "output_tokens_per_s": statistics.mean(known) if len(known) == len(rates[label]) else None,
        "output_tokens_per_s_ci95": statistics.half_width_95(known),
        "mean_ttft_s": _mean(feasible, "ttft_mean_s"),
        "ratio_to_baseline": ratio,
        "ci95": statistics.interval(ratio, half),
        "noise_floor": floor,
        "verdict": told,
        "ttft_p99_s": _mean(feasible, "ttft_p99_s"),
        "tpot_p99_s": _mean(feasible, "tpot_p99_s"),
        **{name: _mean(feasible, name) for name in _SUMMARY},
        "seeds": len(rates[label]),
      }
    )
  return table


def point_of(measured: Mapping[str, Any], target: float | None) -> Mapping[str, Any] | None:
  """The point at a target, or the peak with its throughput under the same names."""
  if target is None:
    return {
      **measured["peak"], "output_tokens_per_s": measured["peak_output_tokens_per_s"]
    }  # fmt: skip
  return measured["at"].get(f"{target:g}")


def verdict(ratio: float | None, half: float | None, floor: float | None) -> str:
  """In words: whether a ratio differs from 1 by more than its interval and the noise floor."""
  if ratio is None:
    return "infeasible"
  if half is None:
    return "one seed"
  noise = max(half, floor or 0.0, throughput.TOLERANCE - 1.0)
  if abs(ratio - 1.0) <= noise:
    return "not distinguishable"
  return "gain" if ratio > 1.0 else "loss"


def plot_ratios(path: pathlib.Path, table: Sequence[Row]) -> None:
  """Bars of the throughput of every row."""
  plots.bars(
    path,
    {str(row["label"]): row["output_tokens_per_s"] for row in table},
    "output tokens/s",
  )


def _throughput(point: Mapping[str, Any] | None) -> float | None:
  return None if point is None else point["output_tokens_per_s"]


def _mean(points: Sequence[Mapping[str, Any]], name: str) -> float | None:
  return statistics.mean([point[name] for point in points if point.get(name) is not None])
