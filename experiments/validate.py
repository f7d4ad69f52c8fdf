"""Serves the requests of a real run again in the simulation and says how far off it is.

  python -m experiments.validate --run=runs/throughput --profile_folder=runs/calibrate

Every point of a folder of `throughput`: the same requests and arrivals, pools, budgets, initial
cache, system, shown costs, padded shapes and shared reads, on the clock of the profile; points of a
policy of one's own with it, as long as its text is the one that served them; else a line says that
they are left out. Writes `validation.json` (a row a point, the mean signed error, the spread
between real repeats, ratios between systems, verdicts), `ttft.png` and `throughput.png` (simulated
against real) and `summary.json` to --out. Points that the profile was fitted to, as `calibrate`
noted beside it, are marked and counted apart. Where a kernel loads layer by layer beside compute, a
real step counts the first layer's wait alone as stall, a simulated one every layer's: their stall
fractions are no like for like. `bound` is what a system with free loads reaches at 5 T_ref on that
clock, and the share of it that each real system does.
"""

import math
import pathlib
from typing import Any

from experiments import (
  flags,
  plots,
  profile_flags,
  run_files,
  run_folder,
  throughput_folder,
  validation_bound,
)
from experiments import validation_table as tables
from experiments.measured_run import MeasuredPoint, MeasuredRun
from experiments.sweeps import crossing, throughput, throughput_at_ttft
from experiments.validation_table import Limits
from strata_jax import profile
from strata_jax.profile import Profile
from strata_jax.systems import SYSTEMS

FLAGS = flags.FlagSet("Serves the requests of a real run again in the simulation.")
FLAGS.add_flag("run", str, "", "folder of `throughput`")
profile_flags.add(FLAGS)
FLAGS.add_flag("baseline", str, throughput_at_ttft.BASELINE, "system that ratios are taken to")
FLAGS.add_flag("targets", tuple[float, ...], throughput.TARGETS, "of ratios, in multiples of T_ref")
FLAGS.add_flag(
  "bound", str | None, "oracle_io", "system that is simulated as a bound of all others; or none"
)
FLAGS.add(Limits)
FLAGS.add_flag("out", str, "runs/validate", "folder that the run writes")


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  if not args.run:
    raise flags.UsageError("--run: expected a folder of `throughput`")
  if not all(0 < target < math.inf for target in args.targets):
    raise flags.UsageError(f"--targets: expected numbers > 0, got {args.targets}")
  limits = args.config(Limits)
  if args.bound is not None and args.bound not in SYSTEMS:
    raise flags.UsageError(f"--bound: expected one of {', '.join(SYSTEMS)}, got {args.bound!r}")
  machine = profile_flags.load(args)
  with flags.usage_errors():
    run = MeasuredRun(args.run)
    points = run.servable
    fitted = fitted_points(args.profile_folder or profile.FOLDER, machine.name, run.path)
    out = run_folder.open_run(
      args.out, {"flags": args.as_dict(), "profile": machine.name, "limits": limits}
    )
  if (warning := run.other_model(machine)) is not None:
    run_folder.say(warning)
  for line in run.left_out.values():
    run_folder.say(line)
  rows, simulated = [], []
  with run_folder.Progress(len(points), "validate") as bar:
    for point in points:
      with flags.usage_errors():
        summary = replay(run, point, machine)
      simulated.append({**point.row, "host_gap_ms_median": None, **summary})
      names = {
        "point": point.point_id, "system": point.label, "rate_rps": point.rate_rps,
        "repeat": point.repeat, "fitted": point.point_id in fitted,
      }  # fmt: skip
      rows.append(tables.point_row(names, point.row, summary, limits))
      bar.update(len(rows), str(point))
  reference_s = throughput_folder.reference_ttft_s(one.row for one in run.points)
  targets_s = {} if reference_s is None else {m: m * reference_s for m in args.targets}
  real = [point.row for point in points]
  others = [row for row in rows if not row["fitted"]]
  ratios = tables.ratios(real, simulated, targets_s, args.baseline, limits)
  bound = None
  if args.bound is not None and reference_s is not None:
    with flags.usage_errors():
      bound = _bound(args.bound, run, machine, throughput.HEADLINE * reference_s)
  result = {
    "run": args.run,
    "sources": sorted({run.source(point) for point in run.points}),
    "profile": machine.name,
    "limits": limits,
    "t_ref_s": reference_s,
    "points": rows,
    "bias": tables.bias(rows),
    "bias_of_points_not_fitted": tables.bias(others),
    "mean_error": tables.absolute(rows),
    "mean_error_of_points_not_fitted": tables.absolute(others),
    "spread_of_repeats": tables.spread(rows),
    "ratios": ratios,
    "bound": bound,
  }
  run_folder.write_json(out / "validation.json", result)
  _plot(out / "ttft.png", rows, "ttft_mean_s", "mean TTFT, seconds")
  _plot(out / "throughput.png", rows, "output_tokens_per_s", "output tokens/s")
  for row in rows:
    run_folder.say(tables.line(row))
  told = [one for one in result["ratios"] if one["ok"] is not None]
  run_folder.finish(
    out,
    {
      "run": args.run,
      "profile": machine.name,
      "points": len(rows),
      "points_fitted": sum(row["fitted"] for row in rows),
      "points_ok": sum(row["ok"] for row in rows),
      "points_not_fitted_ok": sum(row["ok"] for row in others),
      "bound": bound,
      "ratios": len(told),
      "ratios_ok": sum(one["ok"] for one in told),
      "bias": result["bias"],
      "mean_error": result["mean_error"],
      "mean_error_of_points_not_fitted": result["mean_error_of_points_not_fitted"],
    },
  )


def _bound(name: str, run: MeasuredRun, machine: Profile, ttft_s: float) -> dict[str, Any]:
  """What the bound reaches in the simulation, and what share of it each real system does."""
  found = validation_bound.at_equal_ttft(run, run.points[0], machine, name, ttft_s)
  most = found["output_tokens_per_s"]
  shares = {
    label: reached / most if reached and most else None
    for label, reached in _reached(run, ttft_s).items()
  }
  return {"system": name, "t_star_of_t_ref": throughput.HEADLINE, **found, "real_of_bound": shares}


def _reached(run: MeasuredRun, ttft_s: float) -> dict[str, float | None]:
  """Output tokens per second of the real systems at a mean TTFT."""
  rows = [point.row for point in run.points]
  table = crossing.table(rows, {throughput.HEADLINE: ttft_s}, run.points[0].label)
  return {row["system"]: row["output_tokens_per_s"] for row in table}


def replay(run: MeasuredRun, point: MeasuredPoint, machine: Profile) -> dict[str, Any]:
  """The summary of the simulated point. Raises OSError, ValueError on files that say too little."""
  workload = run.workload(point)
  summary = run.simulate(point, machine, workload).summary()
  lost = summary["refused"] + summary["aborted"]
  times = [request.arrival_s or 0.0 for request in workload.requests]
  return {**summary, "lost": lost, "arrival_span_s": max(times) - min(times)}


def fitted_points(folder: pathlib.Path | str, name: str, run: pathlib.Path) -> frozenset[int]:
  """The points of a run that a profile was fitted to, as `calibrate` noted in its folder."""
  path = pathlib.Path(folder) / "summary.json"
  if not path.exists():
    return frozenset()
  noted = run_files.read_json(path)
  if noted.get("profile") != name or pathlib.Path(noted.get("run", "")).resolve() != run.resolve():
    return frozenset()
  return frozenset(run_files.need(noted, path, "points"))


def _plot(path: pathlib.Path, rows: list[dict[str, Any]], name: str, title: str) -> None:
  series: dict[str, list[tuple[float, float]]] = {}
  for row in rows:
    pair = row["real"][name], row["simulated"][name]
    if None not in pair and min(pair) > 0:
      series.setdefault(row["system"], []).append(pair)
  plots.scatter(path, series, f"real {title}", f"simulated {title}")


if __name__ == "__main__":
  FLAGS.run(main)
