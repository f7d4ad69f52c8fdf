"""A profile while it is fitted: its numbers so far, and which of them steps told."""

import dataclasses

from strata_jax import calibration_points
from strata_jax.cost_model import IoConfig
from strata_jax.profile import Profile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
  """A number of a profile that was fitted, that the run says itself, or that it timed alone."""

  value: float
  steps: int  # it was fitted to; 0: the run says it
  size_bytes: float | None = None  # of a table: that of the point
  source: str | None = None  # where it comes from, if not from the run's steps


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
    for point in calibration_points.load_points(io, self.profile):
      load = calibration_points.with_point(load, point, gbps)
      self.fitted[point.key] = Fitted(value=gbps, steps=steps, size_bytes=point.size_bytes)
    if gbps > load.peak_gbps:
      load = dataclasses.replace(load, peak_gbps=gbps)
      self.fitted["load.peak_gbps"] = Fitted(value=gbps, steps=steps)
    self.profile = dataclasses.replace(self.profile, load=load)
