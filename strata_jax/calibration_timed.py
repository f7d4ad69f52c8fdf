"""Rates of the loads of other systems of a run, from what its machine did before it served.

A fit sees the steps of one system. Of the others a run tells one thing without any of their steps:
what its loads took once the executor of a back end was warm (`experiments.measured_costs`), those
of a whole context and of a quarter, each with a short prefill that waits for it and nothing else,
five times; the difference of their medians a token, so that the latency is apart and not taken.

That stands for serving where the same bytes are copied in the same way:

- `kernel`: the same fragments by the same kernel. `memcpy_async`: the same copies, K and V of a
  page and layer apart. `memcpy_batch` layer by layer: the same lists of fragments. `device_put`,
  and `copy_engine` where compute waits for the whole load: whole pages.
- not `copy_engine` layer by layer: it copies fragments, its table holds whole pages; and the other
  way round for `memcpy_batch` where compute waits for the whole load.
- not `auto`: parked loads come in another way than those that a prefill waits for.

What decode steps beside a parked load do to its rate is not in it.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from strata_jax import calibration_points
from strata_jax.calibration import Calibration
from strata_jax.calibration_found import Fitted
from strata_jax.calibration_points import Point
from strata_jax.cost_model import CostModel, IoConfig
from strata_jax.profile import Profile


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedLoads:
  """What loads of one system took before a run served."""

  label: str  # of the system
  io: IoConfig
  load_s_per_token: Mapping[int, float]  # by command of the run; those that measured none are out
  served_by: str | None = None  # the back end that the run really had; none: it does not say


def with_timed(
  found: Calibration, fitted_io: IoConfig, timed: Sequence[TimedLoads], source: str
) -> Calibration:
  """The calibration with a point in the link's tables for each back end and size of other systems.

  What the fit itself reads its rate at stays, and so does its rate. Systems that share a point give
  one median, over the commands and what they measured in each; its source names all of them.

  Args:
    found: of the steps of one system.
    fitted_io: how that system moved pages.
    timed: of the run's systems; those without loads are passed over.
    source: names the run.

  Returns:
    `found` with more in `profile`, `fitted` and `kept`; keys are those of tables, `@` and the size
    in bytes behind them. Residuals are those of the fit.
  """
  profile, fitted, kept = found.profile, dict(found.fitted), dict(found.kept)
  own = calibration_points.load_points(fitted_io, profile)
  by_point: dict[Point, list[TimedLoads]] = {}
  for one in timed:
    points = calibration_points.load_points(one.io, profile)
    if points and points != own and not one.io.load_is_free:
      by_point.setdefault(points[0], []).append(one)
  for point, systems in by_point.items():
    key, labels = f"{point.key}@{point.size_bytes:g}", " and ".join(s.label for s in systems)
    if point in own:
      kept[key] = f"timed loads of {labels} not taken: the loads of the fitted steps tell it"
      continue
    reasons = [f"{one.label} {why}" for one in systems if (why := _why_not(one))]
    told = {value for one in systems if not _why_not(one) for value in one.load_s_per_token.items()}
    if not told:
      kept[key] = "; ".join(reasons)
      continue
    gbps = profile.kv_bytes_token / statistics.median(value for _, value in told) / 1e9
    if gbps > profile.load.peak_gbps:
      kept[key] = f"{labels}: {gbps:.1f} GB/s, but the link has {profile.load.peak_gbps:g} at most"
      continue
    load = calibration_points.with_point(profile.load, point, gbps)
    changed = dataclasses.replace(profile, load=load)
    if not math.isclose(_rate(changed, fitted_io), _rate(profile, fitted_io), rel_tol=1e-9):
      kept[key] = f"timed loads of {labels} not taken: the fitted system's rate would change"
      continue
    used = " and ".join(one.label for one in systems if not _why_not(one))
    commands = len({command for command, _ in told})
    profile, fitted[key] = changed, Fitted(
      value=gbps, steps=0, size_bytes=point.size_bytes,
      source=f"timed loads of {commands} command{'s' * (commands > 1)} of {source} before "
      f"serving, {used}",
    )  # fmt: skip
  return dataclasses.replace(found, profile=profile, fitted=fitted, kept=kept)


def _why_not(one: TimedLoads) -> str | None:
  """Why loads before serving do not tell the rate of those that serve."""
  io = one.io
  usual = "copy_engine" if io.load_backend == "memcpy_batch" else io.load_backend
  if not one.load_s_per_token:
    return "has no measured costs of loads"
  if io.load_backend == "auto":
    return "loads for a prefill in another way than parked"
  if one.served_by not in (None, usual):
    return f"was served by {one.served_by}"
  if io.load_backend == "copy_engine" and io.overlap == "layer":
    return "copies fragments, the table holds whole pages"
  if io.load_backend == "memcpy_batch" and io.overlap != "layer":
    return "copies whole pages, the table holds fragments"
  return None


def _rate(profile: Profile, io: IoConfig) -> float:
  return CostModel(profile, io).load_rate
