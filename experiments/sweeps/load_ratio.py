"""How loading-bound batches are, and where the stalls are (the paper's figure 1)."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import plots
from experiments.sweeps import case as cases
from experiments.sweeps import tables
from experiments.sweeps.case import Case
from experiments.sweeps.types import Cell, Options, Row, Sweep

_LIMITS = (1, 10, 100, 1000)
_QUANTILES = tuple(range(0, 101, 2))


def measure(config: Mapping[str, Any]) -> dict[str, Any]:
  """Load ratios of the batches of a closed loop: quantiles, and the stall below each."""
  run, _ = cases.simulate(Case(**config["case"]), None)
  steps = [step for step in run.result.steps if step.prefill_tokens]
  ratios = np.array([step.load_tokens / step.prefill_tokens for step in steps])
  stalls_s = np.array([step.stall_s for step in steps])
  compute_s = sum(step.compute_s for step in steps)
  order = np.argsort(ratios, kind="stable")
  total_s = float(stalls_s.sum())
  summary = run.summary()
  return {
    "batches": len(steps),
    "ratio_quantiles": np.percentile(ratios, _QUANTILES).tolist(),
    "share_above": {str(limit): float((ratios > limit).mean()) for limit in _LIMITS},
    "stall_share_above": {
      str(limit): float(stalls_s[ratios > limit].sum()) / total_s if total_s else 0.0
      for limit in _LIMITS
    },
    "sorted_ratios": ratios[order].tolist(),
    "cumulative_stall": (np.cumsum(stalls_s[order]) / total_s).tolist() if total_s else [],
    "stall_s": total_s,
    "prefill_waiting_share": total_s / (total_s + compute_s) if steps else 0.0,
    "stall_fraction": summary["stall_fraction"],
    "bubble_fraction": summary["bubble_fraction"],
  }


def _cells(options: Options) -> list[dict[str, Any]]:
  variants = {
    system: Case(system=system, hardware=options.hardware, model=options.model)
    for system in options.systems or ("hicache_paper", "hicache_batch", "strata")
  }
  return tables.cells(options, variants, seeds=1, targets=())


def _table(options: Options, found: Sequence[Cell]) -> list[Row]:
  return [
    {
      "label": config["label"],
      "seed": config["case"]["seed"],
      "batches": measured["batches"],
      "median_ratio": measured["ratio_quantiles"][len(_QUANTILES) // 2],
      **{f"share_above_{k}": v for k, v in measured["share_above"].items()},
      **{f"stall_share_above_{k}": v for k, v in measured["stall_share_above"].items()},
      "prefill_waiting_share": measured["prefill_waiting_share"],
      "stall_fraction": measured["stall_fraction"],
      "bubble_fraction": measured["bubble_fraction"],
    }
    for config, measured in found
  ]


def _plot(path: pathlib.Path, found: Sequence[Cell]) -> None:
  series = {}
  for config, measured in found:
    if config["case"]["seed"]:
      continue
    ratios = np.maximum(measured["sorted_ratios"], 0.1)
    share = (np.arange(len(ratios)) + 1) / len(ratios)
    series[f"{config['label']}: batches"] = (ratios.tolist(), share.tolist())
    if measured["cumulative_stall"]:
      series[f"{config['label']}: stall"] = (ratios.tolist(), measured["cumulative_stall"])
  plots.lines(path, series, "load ratio of the batch", "cumulative share", log_x=True)


SWEEP = Sweep(
  name="load_ratio", about="load ratio by batch and the stall it causes, closed loop",
  cells=_cells, measure=measure, table=_table, plot_cells=_plot,
  unused=("targets",),
)  # fmt: skip
