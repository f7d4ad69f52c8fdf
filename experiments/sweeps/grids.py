"""Sweeps over one field: page size, machine, host memory, thresholds."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.sweeps import tables, throughput
from experiments.sweeps.case import Case
from experiments.sweeps.types import Cell, Options, Row, Sweep

_SEEDS = 5
_THRESHOLDS: Mapping[str, tuple[Any, ...]] = {
  "scheduler.deferral_threshold_tokens": (0, 100, 1000, 10000, math.inf),
  "scheduler.ratio_threshold": (1, 10, 100, 1000, math.inf),
  "scheduler.bundle_slack_tokens": (0, 100, 1000, 10000),
  "scheduler.window_s": (0, 0.05, 0.1, 0.2, 0.4, 1, math.inf),
  "scheduler.max_deferrals": (1, 4, 8, 32, math.inf),
  "scheduler.max_postponements": (1, 4, 8, 32, math.inf),
  "scheduler.max_bypasses": (1, 4, 8, 32, math.inf),
}
# Delay hits are on contexts that are being computed: these start cold, with twins side by side.
_OF_DEFERRAL = ("scheduler.deferral_threshold_tokens", "scheduler.max_deferrals")


def _sweep(
  name: str,
  about: str,
  variants: Callable[[Options], Mapping[str, Case]],
  baseline: str | None,
  *,
  at_ttft: bool,
  unused: tuple[str, ...] = (),
) -> Sweep:
  """A sweep over labelled cases: at 5 T_ref, or closed loop at the cap on requests in flight."""
  targets = (throughput.HEADLINE,) if at_ttft else ()

  def cells(options: Options) -> list[dict[str, Any]]:
    return tables.cells(options, variants(options), seeds=_SEEDS, targets=targets)

  def table(options: Options, found: Sequence[Cell]) -> list[Row]:
    return tables.rows(found, baseline, target=throughput.HEADLINE if at_ttft else None)

  return Sweep(
    name=name, about=about, cells=cells, measure=throughput.measure, table=table,
    plot=tables.plot_ratios, unused=("systems", "targets", *unused),
  )  # fmt: skip


def _pages(options: Options) -> dict[str, Case]:
  names = ["hicache_paper", *(f"hicache_paper_{p}" for p in (64, 128, 256, 512, 1024))]
  names += ["hicache_batch", *(f"hicache_batch_{p}" for p in (64, 128, 256, 512, 1024))]
  fixed = {"hardware": options.hardware, "model": options.model}
  cases = {name: Case(system=name, **fixed) for name in names}
  for page_size in (1, 16, 64, 256, 512):
    overrides = {"page_size": page_size}
    cases[f"strata_io_{page_size}"] = Case(system="strata_io", overrides=overrides, **fixed)
  return cases


def _machines(options: Options) -> dict[str, Case]:
  return {
    f"{hardware}: {system}": Case(system=system, hardware=hardware, model="llama31_8b")
    for hardware in ("h200", "h200_jax", "a100_pcie4", "gh200")
    for system in ("hicache_paper", "hicache_batch", "strata", "oracle_io")
  }


def _host(options: Options) -> dict[str, Case]:
  fixed = {"hardware": options.hardware, "model": options.model, "initial_cache": "cold"}
  return {
    f"{system}: {tokens:,} tokens": Case(system=system, host_tokens=tokens, **fixed)
    for system in ("hicache_paper", "strata")
    for tokens in (250_000, 500_000, 1_000_000, 2_000_000, 4_000_000)
  }


def _threshold(field: str) -> Callable[[Options], dict[str, Case]]:
  def variants(options: Options) -> dict[str, Case]:
    fixed: dict[str, Any] = {"hardware": options.hardware, "model": options.model}
    if field in _OF_DEFERRAL:
      fixed |= {"workload": "loogle_like_adjacent", "initial_cache": "cold"}
    return {
      f"{value:g}": Case(system="strata", overrides={field: value}, **fixed)
      for value in _THRESHOLDS[field]
    }

  return variants


SWEEPS = (
  _sweep(
    "page_size", "page sizes of copies and of the kernel, all FCFS, closed loop", _pages,
    "hicache_paper", at_ttft=False,
  ),
  _sweep(
    "hardware", "machines with other links", _machines, "h200: hicache_paper", at_ttft=True,
    unused=("hardware", "model"),
  ),
  _sweep(
    "host_capacity", "sizes of the host tier, from a cold cache", _host, None, at_ttft=False
  ),
  *(
    _sweep(
      f"threshold_{field.split('.')[1]}", f"values of {field}, closed loop", _threshold(field),
      None, at_ttft=False,
    )
    for field in _THRESHOLDS
  ),
)  # fmt: skip
