"""What the throughput experiment is asked to measure: systems, rates, and the order of points."""

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments import flags, sweep
from experiments.sweeps import crossing, rate_search, tables
from strata_jax import policy_loading, systems
from strata_jax.systems import SystemConfig

_WITH = " with "  # between the label of a system and its policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
  """A system under a label, with the rates at which it is measured.

  The label: the preset's name, with @PAGE_SIZE behind it where that is not the preset's, and
  " with NAME" where another policy stands in the place of the system's.
  """

  label: str
  system: SystemConfig
  policy: str | None = None  # in the place of the system's: a name, FILE.py:NAME or module:NAME
  rates_rps: tuple[float, ...]  # ascending; in a search the first guess alone
  searches: bool = False  # rates are found that bracket the targets

  @property
  def policy_name(self) -> str:
    """Of what schedules."""
    return self.policy or self.system.policy

  @property
  def policy_digest(self) -> str | None:
    """Of the text that a policy of one's own stands in; None: a policy by name."""
    return policy_digest(self.policy_name)


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


def policy_digest(spec: str) -> str | None:
  """Of the text of FILE.py:NAME or module:NAME; None for a name. Raises ValueError: none there."""
  if ":" not in spec:
    return None
  return hashlib.blake2b(sweep.policy_source(spec).encode(), digest_size=12).hexdigest()


def contenders(
  names: Sequence[str], rates: Sequence[str], policy: str | None = None
) -> tuple[Contender, ...]:
  """The systems in the order in which they were named.

  Args:
    names: NAME or NAME@PAGE_SIZE each.
    rates: LABEL:RATE:RATE... or LABEL:auto:RATE each, LABEL as in `names`, or that of a system
      with the policy.
    policy: also in the place of that of every system that has strata's, behind it, at its rates
      unless it has rates of its own.

  Raises:
    UsageError: unknown systems, systems that no machine can run, missing or impossible rates, a
      policy that cannot be loaded or has no system to stand on.
  """
  if not names:
    raise flags.UsageError("--systems: expected at least one system, got none")
  found = {name: _system(name) for name in names}
  if len(found) < len(names):
    raise flags.UsageError(f"--systems: expected each system once, got {','.join(names)}")
  own = {} if policy is None else _with_policy(found, policy)
  by_label: dict[str, tuple[tuple[float, ...], bool]] = {}
  for text in rates:
    label, asked = _rates(text, (*found, *own.values()))
    if label in by_label:
      raise flags.UsageError(f"--rates: expected {label} once, with all its rates, got {text!r}")
    by_label[label] = asked
  result: list[Contender] = []
  for label, system in found.items():
    if label not in by_label:
      raise flags.UsageError(f"--rates: expected rates of every system, got none of {label}")
    rates_rps, searches = by_label[label]
    result.append(Contender(label=label, system=system, rates_rps=rates_rps, searches=searches))
    if label in own:
      rates_rps, searches = by_label.get(own[label], by_label[label])
      result.append(
        Contender(
          label=own[label], system=system, policy=policy, rates_rps=rates_rps, searches=searches
        )
      )
  return tuple(result)


def contender_of(label: str, policy: str | None) -> Contender:
  """What has a label, at no rate in particular. `policy`: of its points. Raises UsageError."""
  system, other, _ = label.partition(_WITH)
  (found,) = contenders((system,), (f"{system}:1",))
  return dataclasses.replace(found, label=label, policy=policy if other else None)


def order(
  found: Sequence[Contender], repeats: int, once: Sequence[str] = ()
) -> list[tuple[Contender, int]]:
  """Systems and repeats; every repeat begins with another system.

  Args:
    found: the systems.
    repeats: how many.
    once: labels of systems that stand in the first repeat alone.

  Raises:
    UsageError: a label of no system.
  """
  for label in once:
    if all(contender.label != label for contender in found):
      expected = ", ".join(contender.label for contender in found)
      raise flags.UsageError(f"--once: expected some of {expected}, got {label!r}")
  turns = []
  for repeat in range(repeats):
    first = repeat % len(found)
    turns += [
      (contender, repeat)
      for contender in [*found[first:], *found[:first]]
      if not repeat or contender.label not in once
    ]
  return turns


def points(
  contender: Contender, repeat: int, rows: Sequence[Mapping[str, Any]], targets_s: Sequence[float]
) -> Iterator[Point]:
  """What is to be measured of a system in a repeat, as far as it is not in `rows`.

  Args:
    contender: the system.
    repeat: its number.
    rows: of all points so far; whoever iterates adds each point before the next one.
    targets_s: mean TTFTs that a search brackets, the largest first.
  """
  mine = lambda of: [
    row for row in rows if row["system"] == contender.label and row["repeat"] == of
  ]
  if not contender.searches:
    for rate in contender.rates_rps:
      if all(row["rate_rps"] != rate for row in mine(repeat)):
        yield Point(label=contender.label, rate_rps=rate, repeat=repeat)
    return
  for target_s in sorted(targets_s, reverse=True):
    start = contender.rates_rps[0]
    if repeat:  # where the repeat before found it
      good = [row["rate_rps"] for row in mine(repeat - 1) if crossing.sustains(row, target_s)]
      start = max(good, default=start)
    while (rate := rate_search.next_rate(mine(repeat), start, target_s)) is not None:
      count = len(rows)
      yield Point(label=contender.label, rate_rps=rate, repeat=repeat)
      if len(rows) == count:  # it was not measured: neither will be what follows from it
        return


def expected_s(point: Point, requests: int, rows: Sequence[Mapping[str, Any]]) -> float:
  """How long a point will take: no system is faster than at its best so far."""
  served = [
    row["requests_per_s"]
    for row in rows
    if row["system"] == point.label and not row["lost"] and row["requests_per_s"]
  ]
  overloads = served and point.rate_rps > 1.1 * max(served)
  return requests / (1.1 * max(served) if overloads else point.rate_rps)


def _with_policy(found: Mapping[str, SystemConfig], policy: str) -> dict[str, str]:
  """By label of a system that has strata's policy: the label with this one."""
  with flags.usage_errors():
    policy_loading.load_policy(policy)
  own = {
    label: f"{label}{_WITH}{tables.policy_name(policy)}"
    for label, system in found.items()
    if system.policy == "strata"
  }
  if not own:
    raise flags.UsageError(
      f"--policy: expected a system with strata's policy in --systems, got {', '.join(found)}"
    )
  return own


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
    if not int(page_size):
      raise flags.UsageError(f"--systems: expected a page size >= 1, got {label}")
    system = dataclasses.replace(system, page_size=int(page_size))
  return system


def _rates(text: str, labels: tuple[str, ...]) -> tuple[str, tuple[tuple[float, ...], bool]]:
  label = max((one for one in labels if f"{text}:".startswith(f"{one}:")), key=len, default=None)
  if label is None:
    raise flags.UsageError(
      f"--rates: expected SYSTEM:RATE:RATE... with one of {', '.join(labels)}, got {text!r}"
    )
  values = text.removeprefix(label).split(":")[1:]
  searches = values[:1] == ["auto"]
  if searches:
    values = values[1:]
  try:
    rates = sorted({float(value) for value in values})
  except ValueError:
    rates = []
  if not rates or not 0 < rates[0] <= rates[-1] < math.inf or (searches and len(rates) > 1):
    raise flags.UsageError(
      f"--rates: expected numbers > 0 behind {label}, or auto and one number, got {text!r}"
    )
  return label, (tuple(rates), searches)
