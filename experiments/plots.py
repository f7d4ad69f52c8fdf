"""Plots as PNG. Matplotlib is the extra `plots`; without it a run says so and goes on."""

import importlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import run_folder
from strata_jax.metrics import RequestRecord

_PARTS = (
  ("client", lambda row: row["client_s"]),
  ("queue", lambda row: row["queue_s"]),
  ("stall", lambda row: row["stall_s"]),
  ("compute", lambda row: row["compute_s"]),
  ("other work", lambda row: max(0.0, row["prefill_s"] - row["stall_s"] - row["compute_s"])),
)
_COLUMNS = 200  # requests are averaged into at most this many bars


def waterfall(path: pathlib.Path, records: Sequence[RequestRecord]) -> None:
  """Where the TTFT of requests went, in the order of their arrival."""
  rows = [record.row() for record in records if record.first_token_s is not None]
  if not rows:
    return
  groups = np.array_split(np.arange(len(rows)), min(_COLUMNS, len(rows)))

  def draw(axes: Any) -> None:
    bottom = np.zeros(len(groups))
    for name, part in _PARTS:
      heights = np.array([np.mean([part(rows[i]) or 0.0 for i in group]) for group in groups])
      axes.bar(np.arange(len(groups)), heights, bottom=bottom, width=1.0, label=name)
      bottom += heights
    axes.set_xlabel("requests by arrival" if len(groups) < len(rows) else "request")
    axes.set_ylabel("seconds to the first token")
    axes.legend(loc="upper left")

  _figure(path, draw)


def bars(
  path: pathlib.Path, values: Mapping[str, float | None], label: str, title: str = ""
) -> None:
  """One bar a name; None is left out."""
  shown = {name: value for name, value in values.items() if value is not None}

  def draw(axes: Any) -> None:
    axes.barh(list(shown), list(shown.values()))
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_title(title)

  _figure(path, draw)


def lines(
  path: pathlib.Path,
  series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
  x_label: str,
  y_label: str,
  *,
  log_x: bool = False,
) -> None:
  """One line a name: (x, y)."""

  def draw(axes: Any) -> None:
    for name, (x, y) in series.items():
      axes.plot(x, y, marker="o" if len(x) < 50 else None, label=name)
    if log_x:
      axes.set_xscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(loc="upper left", fontsize="small")

  _figure(path, draw)


def scatter(
  path: pathlib.Path,
  series: Mapping[str, Sequence[tuple[float, float]]],
  x_label: str,
  y_label: str,
) -> None:
  """Pairs > 0 on logarithmic axes, a colour a name, with the line on which both are equal."""

  def draw(axes: Any) -> None:
    values = [value for pairs in series.values() for pair in pairs for value in pair]
    ends = (min(values, default=0.1) / 1.2, max(values, default=1.0) * 1.2)
    axes.plot(ends, ends, color="grey", linewidth=1, label="equal")
    for name, pairs in series.items():
      axes.scatter(*zip(*pairs, strict=True), label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(loc="upper left", fontsize="small")

  _figure(path, draw)


def _figure(path: pathlib.Path, draw: Callable[[Any], None]) -> None:
  try:
    figures = importlib.import_module("matplotlib.figure")
  except ImportError:
    run_folder.say(f"{path.name}: not drawn, matplotlib is not installed (extra: plots)")
    return
  figure = figures.Figure(figsize=(9, 5), layout="constrained")
  draw(figure.subplots())
  figure.savefig(path, dpi=110, metadata={"Software": None})
