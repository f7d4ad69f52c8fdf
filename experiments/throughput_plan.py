"""What the throughput experiment is asked to measure: systems, rates, and the order of points."""

import dataclasses
import hashlib
from collections.abc import Sequence

from experiments import flags
from strata_jax import systems
from strata_jax.systems import SystemConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
  """A system under a label, with the rates at which it is measured."""

  label: str  # the preset's name, with @PAGE_SIZE behind it where that is not the preset's
  system: SystemConfig
  rates_rps: tuple[float, ...]  # ascending


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
  """One run of the workload."""

  label: str
  rate_rps: float
  repeat: int

  @property
  def seed(self) -> int:
    """Of tokens that no other point has; the same whenever the point is measured."""
    text = f"{self.label}:{self.rate_rps!r}:{self.repeat}"
    return 1 + int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())

  def __str__(self) -> str:
    return f"{self.label} at {self.rate_rps:g} requests/s, repeat {self.repeat}"


def contenders(names: Sequence[str], rates: Sequence[str]) -> tuple[Contender, ...]:
  """The systems in the order in which they were named.

  Args:
    names: NAME or NAME@PAGE_SIZE each.
    rates: LABEL:RATE:RATE... each, LABEL as in `names`.

  Raises:
    UsageError: unknown systems, systems that no machine can run, missing or impossible rates.
  """
  if not names:
    raise flags.UsageError("--systems: expected at least one system, got none")
  found = {name: _system(name) for name in names}
  if len(found) < len(names):
    raise flags.UsageError(f"--systems: expected each system once, got {','.join(names)}")
  by_label = dict(_rates(text, tuple(found)) for text in rates)
  for label in found:
    if label not in by_label:
      raise flags.UsageError(f"--rates: expected rates of every system, got none of {label}")
  return tuple(
    Contender(label=label, system=system, rates_rps=by_label[label])
    for label, system in found.items()
  )


def order(found: Sequence[Contender], repeats: int) -> list[Point]:
  """All points; every repeat begins with another system."""
  points = []
  for repeat in range(repeats):
    first = repeat % len(found)
    for contender in [*found[first:], *found[:first]]:
      points += [
        Point(label=contender.label, rate_rps=rate, repeat=repeat) for rate in contender.rates_rps
      ]
  return points


def _system(label: str) -> SystemConfig:
  name, _, page_size = label.partition("@")
  if name not in systems.SYSTEMS or (page_size and not page_size.isdecimal()):
    expected = ", ".join(systems.SYSTEMS)
    raise flags.UsageError(
      f"--systems: expected NAME or NAME@PAGE_SIZE with one of {expected}, got {label!r}"
    )
  system = systems.SYSTEMS[name]
  if system.ideal != "none":
    raise flags.UsageError(f"--systems: expected systems that a machine can run, got {label}")
  if system.storage != "none":
    raise flags.UsageError(f"--systems: expected systems without a storage tier, got {label}")
  if page_size:
    with flags.usage_errors():
      system = dataclasses.replace(system, page_size=int(page_size))
  return system


def _rates(text: str, labels: tuple[str, ...]) -> tuple[str, tuple[float, ...]]:
  label, *values = text.split(":")
  if label not in labels:
    raise flags.UsageError(
      f"--rates: expected SYSTEM:RATE:RATE... with one of {', '.join(labels)}, got {text!r}"
    )
  try:
    rates = sorted({float(value) for value in values})
  except ValueError:
    rates = []
  if not rates or not 0 < rates[0] <= rates[-1] < float("inf"):
    raise flags.UsageError(f"--rates: expected numbers > 0 behind {label}, got {text!r}")
  return label, tuple(rates)
