"""Throughput at equal mean TTFT of whole systems (the paper's figure 8).

A row whose verdict says that its mean TTFT is below the target is not at equal mean TTFT: no rate
that was tried overloads that system with so few requests (see `throughput`).
`peak_output_tokens_per_s` is the throughput of the closed loop at the cap on requests in flight,
which scales the rates to try. It is no maximum: a system may give more at a target.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments.sweeps import statistics, tables, throughput
from experiments.sweeps.case import Case
from experiments.sweeps.types import Cell, Options, Row, Sweep

BASELINE = "hicache_paper"
ORACLE = "oracle_io"
# All targets for these; the headline alone for the others.
_FULL = (BASELINE, "hicache_batch", "strata", ORACLE)
_HEADLINE = (
  "hicache_today_like", "vllm_lmcache_like", "trtllm_like", "strata_io", "strata_schedule_only",
)  # fmt: skip
_OURS = ("strata", "oracle", "recompute")
_SEEDS = 5
_FULL_SEEDS = 2  # the other targets are measured for these seeds only


def _cells(options: Options) -> list[dict[str, Any]]:
  systems = options.systems or (_FULL if options.quick else _FULL + _HEADLINE)
  variants = {
    system: Case(system=system, hardware=options.hardware, model=options.model)
    for system in systems
  }
  variants = tables.with_policy(options, variants)
  options = dataclasses.replace(options, policy=None)  # it has its rows
  cells = []
  for label, case in variants.items():
    for cell in tables.cells(options, {label: case}, seeds=_SEEDS):
      full = case.system in _FULL and cell["case"]["seed"] < _FULL_SEEDS and not options.quick
      own = throughput.TARGETS if full else (throughput.HEADLINE,)
      cells.append({**cell, "targets": list(options.targets or own)})
  return cells


def _table(options: Options, found: Sequence[Cell]) -> list[Row]:
  rows = tables.rows(found, BASELINE, target=throughput.HEADLINE)
  baselines = {
    row["label"]: row["output_tokens_per_s"]
    for row in rows
    if not row["label"].startswith(_OURS) and row["output_tokens_per_s"] is not None
  }
  best = max(baselines, key=lambda name: baselines[name], default=None)
  result = []
  for row in rows:
    label = row["label"]
    by_target = [_ratio(found, label, BASELINE, target) for target in throughput.TARGETS]
    known = [ratio for ratio in by_target if ratio is not None]
    peaks = [m["peak_output_tokens_per_s"] for c, m in found if c["label"] == label]
    own = {"system": label, **{key: value for key, value in row.items() if key != "label"}}
    result.append(
      {
        **own,
        "ratio_to_best_baseline": _ratio(found, label, best, throughput.HEADLINE),
        "best_baseline": best,
        "fraction_of_oracle": _ratio(found, label, ORACLE, throughput.HEADLINE),
        "ratio_min": min(known, default=None),
        "ratio_max": max(known, default=None),
        "ratio_by_target": dict(
          zip([f"{target:g}" for target in throughput.TARGETS], by_target, strict=True)
        ),
        "reference_ttft_s": statistics.mean(
          [m["reference_ttft_s"] for c, m in found if c["label"] == label]
        ),
        "peak_output_tokens_per_s": statistics.mean(peaks),
      }
    )
  return result


def _ratio(found: Sequence[Cell], label: str, other: str | None, target: float) -> float | None:
  """Mean of the ratios over the seeds for which both were measured at the target."""

  def rates(name: str | None) -> dict[int, float | None]:
    return {
      c["case"]["seed"]: (m["at"][f"{target:g}"] or {}).get("output_tokens_per_s")
      for c, m in found
      if c["label"] == name and f"{target:g}" in m["at"]
    }

  mine, base = rates(label), rates(other)
  seeds = sorted(set(mine) & set(base))
  if not seeds:
    return None
  ratios = statistics.paired_ratios([mine[s] for s in seeds], [base[s] for s in seeds])
  return None if ratios is None else statistics.mean(ratios)


def _plot(path, rows: Sequence[Row]) -> None:
  tables.plot_ratios(path, [{**row, "label": row["system"]} for row in rows])


SWEEP = Sweep(
  name="throughput_at_ttft",
  about="output tokens/s at equal mean TTFT, system by system",
  cells=_cells, measure=throughput.measure, table=_table, plot=_plot,
)  # fmt: skip
