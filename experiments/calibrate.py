"""Fits a profile of the simulation to the measured steps of one system at one rate.

  python -m experiments.calibrate --run=runs/throughput --system=strata@16 --rate=16 \\
    --base_profile=h200_llama31_8b --name=h200_measured --out=runs/calibrate
  python -m experiments.simulate --profile_folder=runs/calibrate --hardware=h200_measured ...

Takes a folder of `throughput` (`--point`, or `--system` and `--rate` with all repeats), or of one
run, with `--system` as it was run. Writes `hardware_<name>.json` and `<name>_<model>.json` to
--out, where fitted numbers are marked as measured and all others are the base's, and
`summary.json` with what was fitted, what was kept and why, and how far off each kind of step is.

Of the other systems of a folder of `throughput` no step is used. Their back ends get the load rate
that every command of the run timed before it served, where that stands for what serving does (see
`strata_jax.calibration_timed`); `--nomeasured_io` leaves them at the base's.
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Sequence

from experiments import flags, measured_run, run_files, run_folder, throughput_plan
from strata_jax import (
  calibrated_profile,
  calibration,
  calibration_steps,
  calibration_timed,
  profile,
  simulation,
)
from strata_jax.calibration_steps import Steps
from strata_jax.calibration_timed import TimedLoads
from strata_jax.executors.buckets import Buckets
from strata_jax.profile import Profile
from strata_jax.systems import SystemConfig

FLAGS = flags.FlagSet("Fits a profile of the simulation to measured steps.")
FLAGS.add_flag("run", str, "", "folder of `throughput`, or of one run with --system")
FLAGS.add_flag("point", int | None, None, "which point of `throughput`, by its order")
FLAGS.add_flag(
  "system", str | None, None, "NAME or NAME@PAGE_SIZE: which points, or how it was run"
)
FLAGS.add_flag("rate", float | None, None, "which points of the system, requests a second")
FLAGS.add_flag("base_profile", str, "h200_llama31_8b", "profile with the numbers that are not told")
FLAGS.add_flag(
  "base_folder", str | None, None, "folder of the base profile; none: the package's own"
)
FLAGS.add_flag("name", str, "measured", "of the machine in the new profile, for --hardware")
FLAGS.add_flag(
  "decode_shares", int | None, None,
  "rows of a decode step that read what they share once, in a folder of one run; none: 1",
)  # fmt: skip
FLAGS.add_flag("min_steps", int, 20, "of each kind that is needed")
FLAGS.add_flag(
  "measured_io", bool, True,
  "other back ends load at the rate that the run timed before it served",
)  # fmt: skip
FLAGS.add_flag("out", str, "runs/calibrate", "folder that the run writes")


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  if not args.run:
    raise flags.UsageError("--run: expected a folder")
  flags.check_folder("run", args.run)
  flags.check_folder("base_folder", args.base_folder)
  with flags.usage_errors():
    base_folder = args.base_folder or profile.FOLDER
    if args.base_profile not in (known := profile.names(base_folder)):
      expected = ", ".join(known)
      raise ValueError(f"--base_profile: expected one of {expected}, got {args.base_profile!r}")
    base = profile.load(args.base_profile, base_folder)
    calibrated_profile.check_name(args.name, args.base_profile, base_folder)
    measured = _measured(args, base)
    steps, system = measured.steps, measured.system
    found = calibration.calibrate(
      steps, base, simulation.io_config(system), buckets=measured.buckets,
      decode_shares=measured.decode_shares, min_steps=args.min_steps,
    )  # fmt: skip
    if args.measured_io and measured.timed:
      found = calibration_timed.with_timed(
        found, simulation.io_config(system), measured.timed, args.run
      )
    out = run_folder.open_run(args.out, {"flags": args.as_dict(), "system": system})
    written = calibrated_profile.write(
      found, base=args.base_profile, base_folder=base_folder, name=args.name, out=out,
      source=measured.source,
    )  # fmt: skip
    profile.load(written, out)
  if measured.warning is not None:
    run_folder.say(measured.warning)
  for line in calibration.kinds(found.residuals):
    run_folder.say(line)
  for key, one in found.fitted.items():
    if one.source is not None:
      run_folder.say(f"taken {key}: {one.value:.1f} GB/s, {one.source}")
  for key, why in found.kept.items():
    run_folder.say(f"kept {key}: {why}")
  run_folder.finish(
    out,
    {
      "profile": written,
      "base_profile": args.base_profile,
      "run": args.run,
      "source": measured.source,
      "system": system.name,
      "page_size": system.page_size,
      "points": measured.points,
      "buckets": measured.buckets,
      "steps": len(steps.started_s),
      "fitted": {key: dataclasses.asdict(one) for key, one in found.fitted.items()},
      "kept": found.kept,
      "residuals": {kind: dataclasses.asdict(one) for kind, one in found.residuals.items()},
    },
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Measured:
  """Steps, how they were run, where they come from, and the ids of their points."""

  steps: Steps
  system: SystemConfig
  source: str
  points: list[int]
  buckets: Buckets | None
  decode_shares: int
  warning: str | None
  timed: tuple[TimedLoads, ...]  # what loads took before serving, of every system


def _measured(args: flags.Args, base: Profile) -> _Measured:
  if measured_run.is_points_folder(args.run):
    if args.decode_shares is not None:
      raise ValueError(f"--decode_shares: expected none, as the points of {args.run} say it")
    run = measured_run.MeasuredRun(args.run)
    points = run.chosen(point=args.point, system=args.system, rate=args.rate)
    path = run.path / "steps.jsonl.gz"
    each = [calibration_steps.read(run.steps(point), f"{path}, {point}") for point in points]
    first = points[0]
    shares = {run.decode_shares(point) for point in points}
    if len(shares) > 1:
      raise ValueError(f"{run.path}: expected points of one decode_shares, got {sorted(shares)}")
    source = f"{run.source(first)}, {first.label} at {first.rate_rps:g} requests/s"
    return _Measured(
      steps=calibration_steps.join(each), system=first.system, source=source,
      points=[point.point_id for point in points], buckets=run.buckets(first),
      decode_shares=shares.pop(), warning=run.other_model(base), timed=_timed(run),
    )  # fmt: skip
  if args.point is not None or args.rate is not None:
    raise ValueError(f"--point, --rate: expected none for a folder of one run, got {args.run}")
  if args.system is None:
    raise ValueError("--system: expected NAME or NAME@PAGE_SIZE for a folder of one run, got none")
  (contender,) = throughput_plan.contenders((args.system,), (f"{args.system}:1",))
  folder = pathlib.Path(args.run)
  path = folder / "steps.jsonl"
  steps = calibration_steps.read(list(run_files.read_rows(path)), str(path))
  config = run_files.read_json(folder / "config.json")
  source = f"{args.run}, {config.get('device_kind')}, commit {config.get('git_sha')}"
  return _Measured(
    steps=steps, system=contender.system, source=f"{source}, {args.system}", points=[],
    buckets=None, decode_shares=1 if args.decode_shares is None else args.decode_shares,
    warning=None, timed=(),
  )  # fmt: skip


def _timed(run: measured_run.MeasuredRun) -> tuple[TimedLoads, ...]:
  """What loads of the systems of a run took before serving, a median of each command's rows."""
  return tuple(
    _timed_of([point for point in run.points if point.label == label]) for label in run.labels
  )


def _timed_of(points: Sequence[measured_run.MeasuredPoint]) -> TimedLoads:
  """Of one system; 0 and nothing at all both mean that a command did not measure it."""
  by_command: dict[int, list[float]] = {}
  for point in points:
    seconds = (point.row.get("costs") or {}).get("load_s_per_token")
    if seconds:
      by_command.setdefault(point.row.get("command", 0), []).append(seconds)
  first = points[0]
  return TimedLoads(
    label=first.label, io=simulation.io_config(first.system),
    load_s_per_token={key: statistics.median(each) for key, each in by_command.items()},
    served_by=first.row.get("load_io"),
  )  # fmt: skip


if __name__ == "__main__":
  FLAGS.run(main)
