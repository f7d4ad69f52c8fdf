"""What a sweep is: cells to measure, a table over what was measured, a plot."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strata_jax import simulation, systems, validation
from strata_jax.workloads import synthetic

Row = dict[str, Any]
Cell = tuple[Mapping[str, Any], Mapping[str, Any]]  # (config, what was measured)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """What the command line may say about any sweep."""

  hardware: str = "h200"  # machine: <hardware>_<model>.json is the profile
  model: str = "llama31_8b"  # model of the profile
  workload: str = ""  # of synthetic shapes; empty: the sweep's own
  seeds: int = 0  # runs of each cell; 0: the sweep's own number
  limit: int = 0  # requests of a run; 0: all
  systems: tuple[str, ...] = ()  # rows of the table; empty: the sweep's own
  policy: str | None = None  # a name, FILE.py:NAME or module:NAME: rows of its own beside strata's
  targets: tuple[float, ...] = ()  # mean TTFTs, in isolated uncached ones; empty: the sweep's own
  quick: bool = False  # few requests, seeds and systems

  def __post_init__(self) -> None:
    simulation.find_profile(self.hardware, self.model)
    if self.workload:
      validation.check_choice(self, "workload", synthetic.GENERATORS)
    validation.check_int(self, "seeds", minimum=0)
    validation.check_int(self, "limit", minimum=0)
    for name in self.systems:
      systems.system(name)
    if any(not 0.0 < target < math.inf for target in self.targets):
      validation.fail(self, "targets", "numbers > 0", self.targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
  """`cells` gives configs of plain values; `measure`, a function of a module, runs one."""

  name: str
  about: str
  cells: Callable[[Options], list[dict[str, Any]]]
  measure: Callable[[Mapping[str, Any]], dict[str, Any]]
  table: Callable[[Options, Sequence[Cell]], list[Row]]
  plot: Callable[[pathlib.Path, Sequence[Row]], None] | None = None
  unused: tuple[str, ...] = ()  # options that say nothing here, and are refused
  plot_cells: Callable[[pathlib.Path, Sequence[Cell]], None] | None = None
