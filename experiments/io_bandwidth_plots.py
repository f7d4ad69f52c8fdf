"""The two plots of `io_bandwidth`."""

import pathlib
from collections.abc import Mapping
from typing import Any

from experiments import plots

_BY_FRAGMENT = ("kernel", "cuda_register_copy", "driver_batch", "driver_each", "reference")
_BY_BLOCKS = ("kernel", "cuda_register_copy")
_BLOCKS = 2
_FRAGMENT_BYTES = 4096


def draw(out: pathlib.Path, summary: Mapping[str, Any]) -> None:
  """Bandwidth against fragment size (kernels with 2 blocks), and against blocks (4 KiB)."""
  single = [
    row
    for row in summary["rows"]
    if row["page_bytes"] == row["fragment_bytes"] and row["pool_bytes"] <= 2 << 30
  ]
  by_fragment = _series(
    [row for row in single if row["blocks"] in (0, _BLOCKS)], _BY_FRAGMENT, "fragment_bytes"
  )
  by_blocks = _series(
    [row for row in single if row["fragment_bytes"] == _FRAGMENT_BYTES], _BY_BLOCKS, "blocks"
  )
  for direction in ("load", "store"):
    ceiling = summary[f"ceiling_{direction}_gbps"]
    for series in (by_fragment, by_blocks):
      places = sorted({x for xs, _ in series.values() for x in xs})
      if places:
        series[f"one large DMA, {direction}"] = ([places[0], places[-1]], [ceiling, ceiling])
  label = "GB/s"
  plots.lines(out / "by_fragment.png", by_fragment, "bytes of a fragment", label, log_x=True)
  if by_blocks:
    plots.lines(out / "by_blocks.png", by_blocks, "blocks, fragments of 4 KiB", label)


def _series(rows, backends, x: str) -> dict[str, tuple[list[float], list[float]]]:
  found = {}
  for backend in backends:
    for direction in ("load", "store"):
      points = {
        row[x]: row["gbps"]
        for row in rows
        if row["backend"] == backend and row["direction"] == direction
      }
      if points:
        places = sorted(points)
        found[f"{backend}, {direction}"] = (places, [points[place] for place in places])
  return found
