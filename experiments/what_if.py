"""Serves the requests of a measured run again in the simulation, with other settings.

  python -m experiments.what_if --run=results/h200/throughput_22_contexts \\
    --profile_folder=results/h200/calibration --systems=strata_auto --rate=476 --seeds=6 \\
    --vary=max_bypasses:8:32,order:fcfs:most_shared,joint_tokens:0:256
  python -m experiments.what_if --run=... --profile_folder=... --policy=mine.py:schedule

Fields of the scheduler and of the shapes, every value with every other one, behind a row of the
system's own setting with the shapes of the run. A system's policy sets some fields whatever is
asked for (`fcfs` has an order): they stay, and settings that come to the same are served once. With
`--policy` all settings follow once more under that policy in the place of the system's; it is given
each setting as its config. Points that were served with a policy of one's own are served with it,
as long as its text is the same; else a line says that they are left out. `ratio_to_own` is the mean
over the seeds of what a setting gives over what the system's own does, `ci95` its 95 % interval.

Pools, shown costs and shared reads are those of the system's point at that rate, or of its first
one. Seeds shift when requests come; the first is that of the run's first repeat, and so on. Where
they come faster than they are served that changes little: with `--shuffle` they come in another
order too, from the second seed on. As in the run a point ends after its limit (`point_limit_s` of
its config): at a low rate the last requests come too late and count as `lost`. Writes
`config.json`, `rows.jsonl` (a row a setting) and `summary.json` to --out.
"""

import dataclasses
import difflib
import itertools
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import flags, profile_flags, run_folder, sweep
from experiments.measured_run import SHAPES, MeasuredPoint, MeasuredRun
from experiments.sweeps import statistics, tables
from experiments.sweeps.types import Row
from strata_jax import policy_loading, simulation
from strata_jax.executors.buckets import Buckets
from strata_jax.profile import Profile
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import POLICIES, policy_config
from strata_jax.systems import SystemConfig

FLAGS = flags.FlagSet("Serves the requests of a measured run in the simulation, set otherwise.")
FLAGS.add_flag("run", str, "", "folder of `throughput`")
profile_flags.add(FLAGS)
FLAGS.add_flag("systems", tuple[str, ...], (), "of the run; empty: all")
FLAGS.add_flag("rate", float | None, None, "requests/s; none: that of a system's first point")
FLAGS.add_flag("seeds", int, 1, "runs of each setting, with other arrival times")
FLAGS.add_flag("shuffle", bool, False, "from the second seed on requests come in another order")
FLAGS.add_flag(
  "vary", tuple[str, ...], (),
  "FIELD:VALUE:VALUE..., a field of the scheduler or "
  f"{', '.join(SHAPES)}; commas between fields",
)  # fmt: skip
FLAGS.add_flag(
  "policy", str | None, None,
  "a name, FILE.py:NAME or module:NAME: rows of its own behind those of each system",
)  # fmt: skip
FLAGS.add_flag("out", str, "runs/what_if", "folder that the run writes")

_COUNTS = frozenset(
  field.name for field in dataclasses.fields(SchedulerConfig) if type(field.default) is int
)
_BY_SEED = "output_tokens_per_s_by_seed"
_MEANS = ("output_tokens_per_s", "ttft_mean_s", "ttft_p99_s", "stall_fraction", "bubble_fraction")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """A system of the run as it is served again."""

  point: MeasuredPoint  # gives pools, shown costs, shared reads
  policy: str | None  # in the place of the system's
  system: SystemConfig
  buckets: Buckets
  fields: Mapping[str, Any]  # what is varied, as it comes to be

  @property
  def label(self) -> str:
    """The system, and a policy that is not its own."""
    own = self.point.label
    return own if self.policy is None else f"{own} with {tables.policy_name(self.policy)}"

  def __str__(self) -> str:
    return " ".join([self.label, *(f"{k}={value}" for k, value in self.fields.items())])


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  if not args.run:
    raise flags.UsageError("--run: expected a folder of `throughput`")
  if args.seeds < 1:
    raise flags.UsageError(f"--seeds: expected an integer >= 1, got {args.seeds}")
  if args.rate is not None and not 0 < args.rate < math.inf:
    raise flags.UsageError(f"--rate: expected a number > 0, got {args.rate}")
  varied = parse(args.vary)
  machine = profile_flags.load(args)
  with flags.usage_errors():
    if args.policy is not None:
      policy_loading.load_policy(args.policy)
    run = MeasuredRun(args.run)
    points = _points(run, args.systems, args.rate, args.policy)
    for point in points:
      run.workload(point)  # its requests are those of the rows
    if args.shuffle:
      run.arriving(args.rate, run.seed, shuffle=True)  # they have another order
    found = [one for point in points for one in settings(run, point, varied, args.policy)]
    out = run_folder.open_run(
      args.out,
      {
        "flags": args.as_dict(), "profile": machine.name, "seed": run.seed,
        "points": {point.label: point.point_id for point in points},
        "systems": {point.label: point.system for point in points},
        "serving": run.serving, "shapes": run.shapes(),
        "settings": [{"system": one.label, **one.fields} for one in found],
      },
    )  # fmt: skip
  if (warning := run.other_model(machine)) is not None:
    run_folder.say(warning)
  if not varied and args.policy is None:
    run_folder.say("without --vary and --policy every system is served in its own setting alone")
  for line in (*(() if args.systems else run.left_out.values()), *left_out(found, varied)):
    run_folder.say(line)
  rows: list[Row] = []
  with run_folder.Progress(len(found) * args.seeds, "what_if") as bar:
    for setting in found:
      own = next((row for row in rows if row["system"] == setting.point.label), None)
      served = []
      for seed in range(args.seeds):
        shuffle = args.shuffle and seed > 0
        served.append(_serve(run, setting, machine, args.rate, run.seed + seed, shuffle))
        bar.update(len(rows) * args.seeds + seed + 1, str(setting))
      rows.append(_row(setting, args.rate, served, own))
  run_folder.write_jsonl(out / "rows.jsonl", rows)
  shown = [{key: row[key] for key in row if key != _BY_SEED} for row in rows]
  run_folder.say(sweep.text_table(shown))
  if (equal := sum(len(set(row[_BY_SEED])) == 1 for row in rows)) and args.seeds > 1:
    run_folder.say(
      f"seeds: {equal} of {len(rows)} settings gave the same throughput with all {args.seeds} of"
      " them: their intervals say nothing"
    )
  if lost := sum(row["lost"] for row in rows):
    run_folder.say(
      f"lost: {lost} requests were refused, or not over when a point of the run ends, after"
      f" {run.point_limit_s:g} s"
    )
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
    if field not in kinds:
      near = " or ".join(difflib.get_close_matches(field, kinds, cutoff=0.7))
      expected = near or f"a field of the scheduler or one of {', '.join(SHAPES)}"
      raise flags.UsageError(f"--vary: {field}: no such field, expected {expected}")
    if not values or "" in values:
      raise flags.UsageError(f"--vary: {field}: expected {field}:VALUE:VALUE..., got {text!r}")
    if field in found:
      raise flags.UsageError(f"--vary: {field}: expected once, with all its values, got {text!r}")
    try:
      found[field] = [_value(field, value, kinds[field]) for value in values]
    except ValueError as error:
      raise flags.UsageError(f"--vary: {field}: {error}, got {text!r}") from error
    if field in SHAPES and min(found[field]) < SHAPES[field]:
      raise flags.UsageError(
        f"--vary: {field}: expected integers >= {SHAPES[field]}, got {min(found[field])}"
      )
  return found


def _value(field: str, text: str, kind: Any) -> Any:
  """Of a field that counts: an integer, though it may be infinite. Raises ValueError."""
  value = flags.parse_value(text, kind)
  if field not in _COUNTS or not math.isfinite(value):
    return value
  if value != int(value):
    raise ValueError("expected an integer or inf")
  return int(value)


def settings(
  run: MeasuredRun,
  point: MeasuredPoint,
  varied: Mapping[str, Sequence[Any]],
  policy: str | None = None,
) -> list[Setting]:
  """What the point had, then all others that differ; with a policy, too, all with that policy.

  Raises UsageError for impossible values.
  """
  own = _settings(run, point, varied, None)
  return own if policy is None else own + _settings(run, point, varied, policy)


def left_out(found: Sequence[Setting], varied: Mapping[str, Sequence[Any]]) -> list[str]:
  """A line a system and field: the values that were asked for and that no setting has."""
  lines = []
  for label in dict.fromkeys(one.label for one in found):
    for name, values in varied.items():
      had = [one.fields[name] for one in found if one.label == label]
      if missing := [str(value) for value in values if value not in had]:
        lines.append(f"{label} sets {name}={had[0]} itself: not served with {', '.join(missing)}")
  return lines


def _settings(
  run: MeasuredRun,
  point: MeasuredPoint,
  varied: Mapping[str, Sequence[Any]],
  policy: str | None,
) -> list[Setting]:
  found: list[Setting] = []
  for values in ((), *itertools.product(*varied.values())):
    asked = dict(zip(varied, values, strict=False))  # the first: none
    shapes = {name: value for name, value in asked.items() if name in SHAPES}
    overrides = {f"scheduler.{k}": value for k, value in asked.items() if k not in SHAPES}
    try:
      system = simulation.system_with(point.system, overrides)
    except ValueError as error:
      raise flags.UsageError(f"--vary: {error}") from error
    scheduler = system.scheduler_config
    named = policy or point.policy
    if named in POLICIES:
      scheduler = policy_config(named, scheduler)
    had = dataclasses.asdict(scheduler) | run.shapes() | shapes
    fields = {name: had[name] for name in varied}
    if all(one.fields != fields for one in found):
      buckets = run.buckets(point, **shapes)
      found.append(
        Setting(point=point, policy=policy, system=system, buckets=buckets, fields=fields)
      )
  return found


def _points(
  run: MeasuredRun, systems: Sequence[str], rate: float | None, policy: str | None
) -> list[MeasuredPoint]:
  """One point a system: the one at the rate, or its first."""
  run.check_systems("systems", systems)
  for label in systems:
    if label in run.left_out:
      raise ValueError(run.left_out[label])
  by_label = {
    label: [point for point in run.points if point.label == label]
    for label in systems or dict.fromkeys(point.label for point in run.servable)
  }
  if policy is not None and not systems:  # those that were served with another one stay away
    plain = {label: found for label, found in by_label.items() if found[0].policy is None}
    by_label = plain or by_label
  at_rate = lambda point: rate is not None and math.isclose(point.rate_rps, rate, rel_tol=1e-9)
  return [next(filter(at_rate, found), found[0]) for found in by_label.values()]


def _serve(
  run: MeasuredRun,
  setting: Setting,
  machine: Profile,
  rate: float | None,
  seed: int,
  shuffle: bool,
) -> dict[str, Any]:
  rate = setting.point.rate_rps if rate is None else rate
  workload = run.arriving(rate, seed, shuffle=shuffle)
  return run.simulate(
    setting.point, machine, workload, system=setting.system, buckets=setting.buckets,
    policy=setting.policy,
  ).summary()  # fmt: skip


def _row(
  setting: Setting, rate: float | None, served: Sequence[Mapping[str, Any]], own: Row | None
) -> Row:
  """Means over the seeds, beside what the system had itself (None: this is it)."""
  means = {
    name: statistics.mean([one[name] for one in served if one[name] is not None]) for name in _MEANS
  }
  tokens = [one["output_tokens_per_s"] for one in served]
  ratio, half = statistics.paired_ratio(tokens, own[_BY_SEED] if own else tokens)
  return {
    "system": setting.label,
    "own_setting": own is None,
    **setting.fields,
    "rate_rps": setting.point.rate_rps if rate is None else rate,
    **means,
    "ratio_to_own": ratio,
    "ci95": statistics.interval(ratio, half),
    "lost": sum(one["refused"] + one["aborted"] for one in served),
    _BY_SEED: tokens,
  }


if __name__ == "__main__":
  FLAGS.run(main)
