"""A profile while it is fitted: its numbers so far, and which of them steps told."""

import dataclasses

from strata_jax.cost_model import (
  DRIVER_FRAGMENT_BYTES,
  LOAD_BLOCKS,
  UNCAPPED_BLOCKS,
  IoConfig,
)
from strata_jax.profile import Profile, RateTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
  """A number of a profile that was fitted, or that the run says itself."""

  value: float
  steps: int  # it was fitted to; 0: the run says it
  size_bytes: float | None = None  # of a table: that of the point


class Found:
  """Keys are those of a profile's sources: `hardware.gate_s`, `load.kernel.2`."""

  def __init__(self, base: Profile) -> None:
    self.profile = base
    self.fitted: dict[str, Fitted] = {}
    self.kept: dict[str, str] = {}  # why a number is still the base's

  def put(self, key: str, value: float, steps: int) -> None:
    """A number of `hardware`, `executor` or `interference.KIND`."""
    section, name = key.split(".", 1)
    profile = self.profile
    if section == "interference":
      kind, name = name.split(".")
      changed = dataclasses.replace(profile.interference[kind], **{name: value})
      self.profile = dataclasses.replace(
        profile, interference={**profile.interference, kind: changed}
      )
    else:
      part = dataclasses.replace(getattr(profile, section), **{name: value})
      self.profile = dataclasses.replace(profile, **{section: part})
    self.fitted[key] = Fitted(value=value, steps=steps)

  def note(self, key: str, value: int) -> None:
    """A number that the run says."""
    self.put(key, value, 0)

  def keep(self, key: str, why: str) -> None:
    """The number stays the base's."""
    self.kept[key] = why

  def put_load_rate(self, bytes_per_s: float, io: IoConfig, steps: int) -> None:
    """The rate of the system's loads: a point of the table that its back end has."""
    load, gbps = self.profile.load, bytes_per_s / 1e9
    page_bytes = io.page_size * self.profile.kv_bytes_token
    fragment_bytes = page_bytes / self.profile.model.num_layers
    if io.load_backend in ("kernel", "auto"):
      blocks = LOAD_BLOCKS if io.capped_blocks else UNCAPPED_BLOCKS
      key, size = f"load.kernel.{blocks}", fragment_bytes
      tables = {**load.kernel, blocks: _with_point(load.kernel[blocks], size, gbps)}
      load = dataclasses.replace(load, kernel=tables)
      if io.load_backend == "auto" and size >= DRIVER_FRAGMENT_BYTES:
        # These were copies by the driver.
        table = _with_point(load.copies["memcpy_batch"], size, gbps)
        load = dataclasses.replace(load, copies={**load.copies, "memcpy_batch": table})
        self.fitted["load.memcpy_batch"] = Fitted(value=gbps, steps=steps, size_bytes=size)
    else:
      whole = io.load_backend in ("copy_engine", "device_put")
      size = page_bytes if whole else fragment_bytes / (2 if io.separate_kv_copies else 1)
      key, table = f"load.{io.load_backend}", load.copies[io.load_backend]
      tables = {**load.copies, io.load_backend: _with_point(table, size, gbps)}
      load = dataclasses.replace(load, copies=tables)
    if gbps > load.peak_gbps:
      load = dataclasses.replace(load, peak_gbps=gbps)
      self.fitted["load.peak_gbps"] = Fitted(value=gbps, steps=steps)
    self.profile = dataclasses.replace(self.profile, load=load)
    self.fitted[key] = Fitted(value=gbps, steps=steps, size_bytes=size)


def _with_point(table: RateTable, size: float, gbps: float) -> RateTable:
  points = {**dict(table.points), float(size): gbps}
  return RateTable(points=tuple(sorted(points.items())))
