"""Where in a profile the rate stands that `CostModel` reads for the loads of a system."""

import dataclasses
from typing import NamedTuple

from strata_jax.cost_model import (
  DRIVER_FRAGMENT_BYTES,
  LOAD_BLOCKS,
  UNCAPPED_BLOCKS,
  IoConfig,
)
from strata_jax.profile import Link, Profile, RateTable


class Point(NamedTuple):
  """One point of a table of the link to the device."""

  key: str  # of the table: `load.kernel.2`, `load.memcpy_async`
  size_bytes: float


def load_points(io: IoConfig, profile: Profile) -> tuple[Point, ...]:
  """The points that decide the rate of the loads.

  Two of them for `auto` where fragments are large enough for the driver: the faster of the kernel
  and the driver counts, and these loads were the driver's. None without a back end.
  """
  if io.load_backend == "none":
    return ()
  page_bytes = io.page_size * profile.kv_bytes_token
  fragment_bytes = page_bytes / profile.model.num_layers
  if io.load_backend in ("kernel", "auto"):
    blocks = LOAD_BLOCKS if io.capped_blocks else UNCAPPED_BLOCKS
    kernel = Point(f"load.kernel.{blocks}", fragment_bytes)
    if io.load_backend == "kernel" or fragment_bytes < DRIVER_FRAGMENT_BYTES:
      return (kernel,)
    by_layer = Point("load.memcpy_batch", fragment_bytes)
    driver = by_layer if io.overlap == "layer" else Point("load.copy_engine", page_bytes)
    return driver, kernel
  if io.load_backend in ("copy_engine", "device_put"):
    return (Point(f"load.{io.load_backend}", page_bytes),)
  copies = 2 if io.separate_kv_copies else 1
  return (Point(f"load.{io.load_backend}", fragment_bytes / copies),)


def with_point(load: Link, point: Point, gbps: float) -> Link:
  """The link with one rate, GB/s, in the place of what the table had at this size, if anything."""
  _, *name = point.key.split(".")
  if name[0] == "kernel":
    blocks = int(name[1])
    kernel = {**load.kernel, blocks: _with(load.kernel[blocks], point.size_bytes, gbps)}
    return dataclasses.replace(load, kernel=kernel)
  copies = {**load.copies, name[0]: _with(load.copies[name[0]], point.size_bytes, gbps)}
  return dataclasses.replace(load, copies=copies)


def _with(table: RateTable, size_bytes: float, gbps: float) -> RateTable:
  points = {**dict(table.points), float(size_bytes): gbps}
  return RateTable(points=tuple(sorted(points.items())))
