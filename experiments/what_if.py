"""Serves the requests of a measured run again in the simulation, with other settings.

  python -m experiments.what_if --run=results/h200/throughput_22_contexts \\
    --profile=h200_serving_llama31_8b --profile_folder=results/h200/calibration \\
    --systems=strata_auto --rate=305 --seeds=6 \\
    --vary=max_bypasses:8:32,order:fcfs:most_shared,joint_tokens:0:256

Fields of the scheduler and of the shapes, every value with every other one, behind a row of the
system's own setting with the shapes of the run. A system's policy sets some fields whatever is
asked for (`fcfs` has an order): they stay, and settings that come to the same are served once.
Pools, shown costs and shared reads are those of the system's point at that rate, or of its first
one. Seeds shift when requests come and nothing else; the first is that of the run's first repeat,
and so on. Writes `config.json`, `rows.jsonl` (a row a setting) and `summary.json` to --out.
"""

import dataclasses
import itertools
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import flags, run_folder, sweep
from experiments.measured_run import SHAPES, MeasuredPoint, MeasuredRun
from experiments.sweeps import statistics
from experiments.sweeps.types import Row
from strata_jax import profile, simulation
from strata_jax.executors.buckets import Buckets
from strata_jax.profile import Profile
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.systems import SystemConfig

FLAGS = flags.FlagSet("Serves the requests of a measured run in the simulation, set otherwise.")
FLAGS.add_flag("run", str, "", "folder of `throughput`")
FLAGS.add_flag("profile", str, "h200_llama31_8b", "by name, model included")
FLAGS.add_flag("profile_folder", str | None, None, "folder of the profile; none: the package's own")
FLAGS.add_flag("systems", tuple[str, ...], (), "of the run; empty: all")
FLAGS.add_flag("rate", float | None, None, "requests/s; none: that of a system's first point")
FLAGS.add_flag("seeds", int, 1, "runs of each setting, with other arrival times")
FLAGS.add_flag(
  "vary", tuple[str, ...], (),
  "FIELD:VALUE:VALUE..., a field of the scheduler or "
  f"{', '.join(SHAPES)}; commas between fields",
)  # fmt: skip
FLAGS.add_flag("out", str, "runs/what_if", "folder that the run writes")

_MEANS = ("output_tokens_per_s", "ttft_mean_s", "ttft_p99_s", "stall_fraction", "bubble_fraction")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """A system of the run as it is served again."""

  point: MeasuredPoint  # gives pools, shown costs, shared reads
  system: SystemConfig
  buckets: Buckets
  fields: Mapping[str, Any]  # what is varied, as it comes to be

  def __str__(self) -> str:
    return " ".join([self.point.label, *(f"{k}={value}" for k, value in self.fields.items())])


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  if not args.run:
    raise flags.UsageError("--run: expected a folder of `throughput`")
  if args.seeds < 1:
    raise flags.UsageError(f"--seeds: expected an integer >= 1, got {args.seeds}")
  if args.rate is not None and not 0 < args.rate < math.inf:
    raise flags.UsageError(f"--rate: expected a number > 0, got {args.rate}")
  varied = parse(args.vary)
  flags.check_folder("profile_folder", args.profile_folder)
  with flags.usage_errors():
    machine = profile.load(args.profile, args.profile_folder or profile.FOLDER)
    run = MeasuredRun(args.run)
    points = _points(run, args.systems, args.rate)
    for point in points:
      run.workload(point)  # its requests are those of the rows
    found = [one for point in points for one in settings(run, point, varied)]
    out = run_folder.open_run(
      args.out,
      {
        "flags": args.as_dict(), "seed": run.seed,
        "points": {point.label: point.point_id for point in points},
        "systems": {point.label: point.system for point in points},
        "serving": run.serving, "shapes": run.shapes(),
        "settings": [{"system": one.point.label, **one.fields} for one in found],
      },
    )  # fmt: skip
  if (warning := run.other_model(machine)) is not None:
    run_folder.say(warning)
  rows: list[Row] = []
  with run_folder.Progress(len(found) * args.seeds, "what_if") as bar:
    for setting in found:
      first = next((row for row in rows if row["system"] == setting.point.label), None)
      served = []
      for seed in range(args.seeds):
        served.append(_serve(run, setting, machine, args.rate, run.seed + seed))
        bar.update(len(rows) * args.seeds + seed + 1, str(setting))
      rows.append(_row(setting, args.rate, served, first))
  run_folder.write_jsonl(out / "rows.jsonl", rows)
  shown = [{key: row[key] for key in row if key != "output_tokens_per_s_by_seed"} for row in rows]
  run_folder.say(sweep.text_table(shown))
  run_folder.finish(
    out,
    {
      "run": args.run,
      "sources": sorted({run.source(point) for point in points}),
      "profile": machine.name,
      "seeds": args.seeds,
      "settings": len(rows),
      "rows": shown,
    },
  )


def parse(texts: Sequence[str]) -> dict[str, list[Any]]:
  """Values by field, of FIELD:VALUE:VALUE... each. Raises UsageError."""
  kinds = typing.get_type_hints(SchedulerConfig) | dict.fromkeys(SHAPES, int)
  found: dict[str, list[Any]] = {}
  for text in texts:
    field, *values = text.split(":")
    if field not in kinds or field in found or not values:
      raise flags.UsageError(
        f"--vary: expected FIELD:VALUE:VALUE..., each field once, with one of {', '.join(kinds)};"
        f" got {text!r}"
      )
    try:
      found[field] = [flags.parse_value(value, kinds[field]) for value in values]
    except ValueError as error:
      raise flags.UsageError(f"--vary: {field}: {error}, got {text!r}") from error
    if field in SHAPES and min(found[field]) < SHAPES[field]:
      raise flags.UsageError(
        f"--vary: {field}: expected integers >= {SHAPES[field]}, got {min(found[field])}"
      )
  return found


def settings(
  run: MeasuredRun, point: MeasuredPoint, varied: Mapping[str, Sequence[Any]]
) -> list[Setting]:
  """What the point had, then all others that differ. Raises UsageError for impossible values."""
  found: list[Setting] = []
  for values in ((), *itertools.product(*varied.values())):
    asked = dict(zip(varied, values, strict=False))  # the first: none
    shapes = {name: value for name, value in asked.items() if name in SHAPES}
    overrides = {f"scheduler.{k}": value for k, value in asked.items() if k not in SHAPES}
    try:
      system = simulation.system_with(point.system, overrides)
    except ValueError as error:
      raise flags.UsageError(f"--vary: {error}") from error
    had = dataclasses.asdict(system.scheduler_config) | run.shapes() | shapes
    fields = {name: had[name] for name in varied}
    if all(one.fields != fields for one in found):
      buckets = run.buckets(point, **shapes)
      found.append(Setting(point=point, system=system, buckets=buckets, fields=fields))
  return found


def _points(run: MeasuredRun, systems: Sequence[str], rate: float | None) -> list[MeasuredPoint]:
  """One point a system: the one at the rate, or its first."""
  known = list(dict.fromkeys(point.label for point in run.points))
  for label in systems:
    if label not in known:
      raise ValueError(f"--systems: expected some of {', '.join(known)}, got {label!r}")
  by_label = {
    label: [point for point in run.points if point.label == label] for label in systems or known
  }
  at_rate = lambda point: rate is not None and math.isclose(point.rate_rps, rate, rel_tol=1e-9)
  return [next(filter(at_rate, found), found[0]) for found in by_label.values()]


def _serve(
  run: MeasuredRun, setting: Setting, machine: Profile, rate: float | None, seed: int
) -> dict[str, Any]:
  workload = run.arriving(setting.point.rate_rps if rate is None else rate, seed)
  return run.simulate(
    setting.point, machine, workload, system=setting.system, buckets=setting.buckets
  ).summary()


def _row(
  setting: Setting, rate: float | None, served: Sequence[Mapping[str, Any]], first: Row | None
) -> Row:
  """Means over the seeds, beside what the system had itself (None: this is it)."""
  means = {
    name: statistics.mean([one[name] for one in served if one[name] is not None]) for name in _MEANS
  }
  tokens, own = means["output_tokens_per_s"], (first or means)["output_tokens_per_s"]
  return {
    "system": setting.point.label,
    "own_setting": first is None,
    **setting.fields,
    "rate_rps": setting.point.rate_rps if rate is None else rate,
    **means,
    "ratio_to_own": tokens / own if tokens is not None and own else None,
    "lost": sum(one["refused"] + one["aborted"] for one in served),
    "output_tokens_per_s_by_seed": [one["output_tokens_per_s"] for one in served],
  }


if __name__ == "__main__":
  FLAGS.run(main)
