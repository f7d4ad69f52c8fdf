"""Each mechanism alone, left out, and one after the other (the paper's figures 9 and 11).

The adjacent order starts from a cold cache: its delay hits are on contexts that are being computed.
The others start host-warm, since computing every context once would hide what loading costs.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from experiments.sweeps import tables, throughput
from experiments.sweeps.case import Case
from experiments.sweeps.types import Cell, Options, Row, Sweep
from strata_jax.workloads import synthetic

# What a mechanism is when it is off: the baseline's I/O and a scheduler without the stage.
OFF: dict[str, dict[str, Any]] = {
  "io": {
    "page_size": 32, "load_backend": "memcpy_async", "store_backend": "memcpy_async",
    "separate_kv_copies": True,
  },
  "deferral": {"scheduler.deferral": False},
  "balance": {"scheduler.balance": False},
  "bundle": {"scheduler.bundles": False},
  "bubble": {"scheduler.bubble_filling": False},
  # Both are nothing without bubble filling.
  "rolling": {"scheduler.rolling_loads": False},
  "joining": {"scheduler.join_loading": False},
}  # fmt: skip
MECHANISMS = tuple(OFF)
_SEEDS = 5


def variants() -> dict[str, tuple[str, ...]]:
  """Label -> the mechanisms that are on. In turn: the first, two, three, all but the last, all."""
  cumulative = [MECHANISMS[:count] for count in range(2, len(MECHANISMS) - 1)]
  return {
    "none": (),
    **{f"{name} alone": (name,) for name in MECHANISMS},
    **{" + ".join(names): names for names in cumulative},
    **{f"all but {name}": tuple(n for n in MECHANISMS if n != name) for name in MECHANISMS},
    "all": MECHANISMS,
    "all scheduling, no io": MECHANISMS[1:],
  }


def case_with(names: Sequence[str], **fields: Any) -> Case:
  """Strata with only the named mechanisms on."""
  off = [OFF[name] for name in MECHANISMS if name not in names]
  overrides = dict(itertools.chain.from_iterable(changes.items() for changes in off))
  return Case(system="strata", overrides=overrides, **fields)


def _sweep(name: str, about: str, target: float | None) -> Sweep:
  """At a target of mean TTFT, or (None) from the peak of the closed loop: one run a cell."""

  def cells(options: Options) -> list[dict[str, Any]]:
    targets = () if target is None else (target,)
    return tables.cells(options, _cases(options), seeds=_SEEDS, targets=targets)

  def table(options: Options, found: Sequence[Cell]) -> list[Row]:
    rows: list[Row] = []
    for order in dict.fromkeys(str(config["label"]).split(":")[0] for config, _ in found):
      own = [cell for cell in found if str(cell[0]["label"]).startswith(f"{order}:")]
      rows += tables.rows(own, f"{order}: none", target=target)
    return rows

  return Sweep(
    name=name, about=about, cells=cells, measure=throughput.measure, table=table,
    plot=tables.plot_ratios, unused=("systems", "targets"),
  )  # fmt: skip


def _cases(options: Options) -> dict[str, Case]:
  orders = ("shuffled",) if options.quick else synthetic.ORDERS
  chosen = variants()
  chosen.pop("all but io")  # the same as "all scheduling, no io"
  if options.quick:
    chosen = {name: chosen[name] for name in ("none", "io alone", "all scheduling, no io", "all")}
  return {
    f"{order}: {label}": case_with(
      names,
      workload=f"loogle_like_{order}",
      hardware=options.hardware,
      model=options.model,
      initial_cache="cold" if order == "adjacent" else "host_warm",
    )
    for order in orders
    for label, names in chosen.items()
  }


SWEEPS = (
  _sweep(
    "ablation",
    "throughput at 5 T_ref with each mechanism alone, left out, and added in turn",
    throughput.HEADLINE,
  ),
  _sweep("ablation_peak", "the same in a closed loop: a tenth of the runs", None),
)
