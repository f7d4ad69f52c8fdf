"""Negative controls: where nothing may be gained, and bounds that nothing may pass."""

import math
from collections.abc import Sequence
from typing import Any

from experiments.sweeps import tables, throughput
from experiments.sweeps.case import Case
from experiments.sweeps.types import Cell, Options, Row, Sweep

_SEEDS = 5
# Group -> its baseline and what is compared with it. The baseline of `bound` is free loads.
_FREE = {"load_is_free": True, "scheduler.ratio_threshold": math.inf}
_GROUPS: dict[str, dict[str, Case]] = {
  "no reuse": {
    system: Case(system=system, workload="no_reuse", initial_cache="cold")
    for system in ("sglang_device", "strata", "hicache_paper")
  },
  "sharegpt": {
    system: Case(system=system, workload="sharegpt_like", initial_cache="cold")
    for system in ("sglang_device", "strata", "hicache_paper")
  },
  "spread order": {
    "no deferral": Case(
      system="strata", workload="loogle_like_spread", overrides={"scheduler.deferral": False}
    ),
    "deferral": Case(system="strata", workload="loogle_like_spread"),
  },
  "bound of strata": {
    "free loads": Case(system="strata", overrides=_FREE), "strata": Case(system="strata")
  },
  "bound of fcfs": {
    "free loads": Case(system="hicache_batch", overrides={"load_is_free": True}),
    "hicache_batch": Case(system="hicache_batch"),
  },
}  # fmt: skip


def _cells(options: Options) -> list[dict[str, Any]]:
  variants = {
    f"{group}: {label}": case for group, cases in _GROUPS.items() for label, case in cases.items()
  }
  return tables.cells(options, variants, seeds=_SEEDS, targets=())


def _table(options: Options, found: Sequence[Cell]) -> list[Row]:
  rows: list[Row] = []
  for group, cases in _GROUPS.items():
    own = [cell for cell in found if str(cell[0]["label"]).startswith(f"{group}:")]
    rows += tables.rows(own, f"{group}: {next(iter(cases))}", target=None)
  return rows


SWEEP = Sweep(
  name="controls", about="negative controls and bounds, closed loop",
  cells=_cells, measure=throughput.measure, table=_table,
  unused=("hardware", "model", "systems", "targets"),
)  # fmt: skip
