"""Throughput at equal mean TTFT out of points measured at given rates.

A point is sustained for a target T* if its mean TTFT is at most T*, nobody was lost, and it drained
within 3 T* or 5 % of the arrival span. Between the highest rate that is sustained and the next one
above it the crossing of T* is found by linear interpolation in the logarithm of the mean TTFT.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.sweeps import case, statistics

BRACKET = 1.25  # rates further apart do not bracket a crossing well
KEPT = (
  "output_tokens_per_s", "requests_per_s", "load_gbps", "stall_fraction", "bubble_fraction",
  "ttft_p50_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "hit_ratio", "host_gap_ms_median",
)  # fmt: skip

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crossing:
  """Where one system reaches a target in one repeat."""

  rate_rps: float | None = None  # None: it cannot be said
  values: Mapping[str, float | None] = dataclasses.field(default_factory=dict)  # KEPT, there
  bracket_rps: tuple[float, float] | None = None
  interpolated: bool = False  # else the values are those of the lower rate
  reason: str = ""  # why there is no rate, or no interpolation


def sustains(row: Row, target_s: float) -> bool:
  """Whether a point is sustained for a target."""
  point = case.Point(
    rate_rps=row["rate_rps"],
    ttft_mean_s=math.inf if row["ttft_mean_s"] is None else row["ttft_mean_s"],
    given_up=False,
    drain_s=row["drain_s"],
    span_s=row["arrival_span_s"],
    lost=row["lost"],
    summary={},
  )
  return point.sustains(target_s)


def find(rows: Sequence[Row], target_s: float) -> Crossing:
  """The crossing of one system's points of one repeat.

  Args:
    rows: of `points.jsonl`, at least one.
    target_s: T*.
  """
  rows = sorted(rows, key=lambda row: row["rate_rps"])
  good = [row for row in rows if sustains(row, target_s)]
  if not good:
    return Crossing(
      reason=f"not sustained at {_rate(rows[0])}, the lowest rate; {_add('lower', rows[0])}"
    )
  low = good[-1]
  above = [row for row in rows if row["rate_rps"] > low["rate_rps"]]
  if not above:
    return Crossing(reason=f"sustained at {_rate(low)}, the highest rate; {_add('higher', low)}")
  high = above[0]
  bracket = (low["rate_rps"], high["rate_rps"])
  at_low = {key: low[key] for key in KEPT}
  if high["lost"] or high["ttft_mean_s"] is None or high["ttft_mean_s"] <= target_s:
    why = "lost requests" if high["lost"] else "did not drain in time"
    return Crossing(
      rate_rps=bracket[0], values=at_low, bracket_rps=bracket,
      reason=f"taken at the lower rate: {bracket[1]:g} requests/s {why}",
    )  # fmt: skip
  span = math.log(high["ttft_mean_s"] / low["ttft_mean_s"])
  share = math.log(target_s / low["ttft_mean_s"]) / span
  return Crossing(
    rate_rps=_between(*bracket, share), bracket_rps=bracket, interpolated=True,
    values={key: _between(low[key], high[key], share) for key in KEPT},
  )  # fmt: skip


def _rate(row: Row) -> str:
  return f"{row['rate_rps']:g} requests/s"


def _add(which: str, row: Row) -> str:
  """What brackets the target, in words of `throughput`."""
  auto = f"{row['system']}:auto:{row['rate_rps']:g}"
  return f"add a {which} one to --rates, or {auto} with this target in --targets"


def table(
  points: Sequence[Row], targets_s: Mapping[float, float], baseline: str
) -> list[dict[str, Any]]:
  """A row a system and target.

  Args:
    points: rows of `points.jsonl`; `repeat` pairs those of different systems.
    targets_s: seconds of each target, by its multiple of T_ref.
    baseline: system that ratios are taken to.
  """
  names = list(dict.fromkeys(row["system"] for row in points))
  repeats = list(dict.fromkeys(row["repeat"] for row in points))
  result = []
  for multiple, target_s in targets_s.items():
    found: dict[str, dict[Any, Crossing]] = {name: {} for name in names}
    for name in names:
      for repeat in repeats:
        rows = [r for r in points if r["system"] == name and r["repeat"] == repeat]
        if rows:
          found[name][repeat] = find(rows, target_s)
    best = _best(found)
    for name, crossings in found.items():
      result.append(
        {
          "system": name,
          "t_star_of_t_ref": multiple,
          "mean_ttft_s": target_s,
          **_row(crossings, found.get(baseline, {}), found[best] if best else {}),
          "best_baseline": best,
        }
      )
  return result


def _row(
  crossings: Mapping[Any, Crossing], base: Mapping[Any, Crossing], best: Mapping[Any, Crossing]
) -> dict[str, Any]:
  known = [c for c in crossings.values() if c.rate_rps is not None]
  ratios = _ratios(crossings, base)
  brackets = [c.bracket_rps for c in known if c.bracket_rps is not None]
  widest = max((high / low for low, high in brackets), default=None)
  rates = [c.rate_rps for c in known if c.rate_rps is not None]
  outputs = [v for c in known if (v := c.values["output_tokens_per_s"]) is not None]
  return {
    "rate_rps": statistics.mean(rates),
    **{key: _mean([c.values[key] for c in known]) for key in KEPT},
    "output_tokens_per_s_min": min(outputs, default=None),
    "output_tokens_per_s_max": max(outputs, default=None),
    "ratio_to_baseline": statistics.mean(ratios),
    "ratio_min": min(ratios, default=None),
    "ratio_max": max(ratios, default=None),
    "ratio_to_best_baseline": statistics.mean(_ratios(crossings, best)),
    "sustained": bool(known),
    "interpolated": bool(known) and all(c.interpolated for c in known),
    "bracket": [min(b[0] for b in brackets), max(b[1] for b in brackets)] if brackets else None,
    "widest_bracket": widest,
    "bracket_is_close": None if widest is None else widest <= BRACKET * 1.01,
    "repeats": len(known),
    "reason": "; ".join(
      f"repeat {repeat}: {c.reason}" for repeat, c in crossings.items() if c.reason
    ),
  }  # fmt: skip


def _best(found: Mapping[str, Mapping[Any, Crossing]]) -> str | None:
  """The system with the highest throughput that is not one of Strata's."""
  means = {}
  for name, crossings in found.items():
    values = [c.values["output_tokens_per_s"] for c in crossings.values() if c.rate_rps is not None]
    mean = _mean(values)
    if mean is not None and not name.startswith("strata"):
      means[name] = mean
  return max(means, key=lambda name: means[name], default=None)


def _ratios(mine: Mapping[Any, Crossing], base: Mapping[Any, Crossing]) -> list[float]:
  """Of the repeats in which both are known."""
  ratios = []
  for repeat, crossing in mine.items():
    value = crossing.values.get("output_tokens_per_s")
    other = base[repeat].values.get("output_tokens_per_s") if repeat in base else None
    if value is not None and other:
      ratios.append(value / other)
  return ratios


def _between(low: float | None, high: float | None, share: float) -> float | None:
  return None if low is None or high is None else low + share * (high - low)


def _mean(values: Sequence[float | None]) -> float | None:
  return statistics.mean([value for value in values if value is not None])
