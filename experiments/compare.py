"""Two runs of the same requests, side by side.

  python -m experiments.compare RUN_A RUN_B

A paired table (B minus A, request by request, with 95 % bootstrap intervals of the mean), the first
decision that differs if both runs were recorded, and the ten requests that won and lost most with
their waterfalls.
"""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import decisions, flags, run_folder
from strata_jax import recording

FLAGS = flags.FlagSet("Compares two run folders: compare RUN_A RUN_B.")
FLAGS.add_flag("run_a", str, "", "first run's folder (or the first argument)")
FLAGS.add_flag("run_b", str, "", "second run's folder (or the second argument)")
FLAGS.add_flag("record_a", str | None, None, "its record; none: what its config.json names")
FLAGS.add_flag("record_b", str | None, None, "its record; none: what its config.json names")
FLAGS.add_flag("metric", str, "ttft_s", "field of requests.jsonl that says who won")
FLAGS.add_flag("most", int, 10, "how many winners and losers to show")
FLAGS.add_flag("resamples", int, 1000, "of the bootstrap")
FLAGS.add_flag("out", str, "runs/compare", "folder that the run writes")

METRICS = (
  "ttft_s", "client_s", "queue_s", "match_s", "prefetch_s", "load_s", "stall_s", "compute_s",
  "prefill_s", "decode_s", "tpot_s", "device_hit_tokens", "host_hit_tokens", "storage_hit_tokens",
  "delay_hit_tokens", "bundle_hit_tokens", "computed_tokens", "recomputed_tokens",
)  # fmt: skip
WATERFALL = (
  "prompt_tokens", "device_hit_tokens", "host_hit_tokens", "storage_hit_tokens",
  "computed_tokens", "queue_s", "prefetch_s", "load_s", "stall_s", "compute_s", "ttft_s",
  "decode_s", "deferrals", "postponements",
)  # fmt: skip

Rows = dict[int, dict[str, Any]]


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  if not args.run_a or not args.run_b:
    raise flags.UsageError("expected two run folders: compare RUN_A RUN_B")
  with flags.usage_errors():
    for name in ("most", "resamples"):
      if getattr(args, name) < 1:
        raise ValueError(f"--{name}: expected an integer >= 1, got {getattr(args, name)}")
    folders = (pathlib.Path(args.run_a), pathlib.Path(args.run_b))
    first, second = (read_requests(folder) for folder in folders)
    named = (args.record_a, args.record_b)
    paths = [name or recorded(folder) for name, folder in zip(named, folders, strict=True)]
    if named == (None, None) and folders[0].resolve() != folders[1].resolve():
      check_two_files(paths)
    records = [recording.read_record(path) if path else None for path in paths]
    both = sorted(first.keys() & second.keys())
    if not both:
      raise ValueError(f"{args.run_a} and {args.run_b}: expected requests in common")
    check_metric(args.metric, [rows[i] for rows in (first, second) for i in both])
    out = run_folder.open_run(args.out, {"flags": args.as_dict()})
    diverges = None
    if records[0] is not None and records[1] is not None:
      diverges = first_divergence(records[0], records[1])
  table = paired_table(first, second, both, resamples=args.resamples)
  won, lost = winners_and_losers(first, second, both, metric=args.metric, most=args.most)
  run_folder.write_json(out / "requests.json", {"won": won, "lost": lost})
  _say(table, diverges, won, lost, args.metric, recorded_both=None not in records)
  run_folder.finish(
    out,
    {
      "run_a": args.run_a,
      "run_b": args.run_b,
      "requests": len(both),
      "only_in_a": len(first) - len(both),
      "only_in_b": len(second) - len(both),
      "table": table,
      "first_divergence": diverges,
      "recorded": None not in records,
      "won": won,
      "lost": lost,
    },
  )


def check_two_files(paths: Sequence[str | None]) -> None:
  """Raises ValueError where two runs wrote one record: the later one's is all that is left."""
  found = {pathlib.Path(path).resolve() for path in paths if path}
  if len(found) == 1 and None not in paths:
    raise ValueError(
      f"{paths[0]}: expected a record a run, got one that both wrote; --record=FILE must differ"
    )


def check_metric(metric: str, rows: Sequence[Mapping[str, Any]]) -> None:
  """Raises ValueError unless the field is a number, or none at most, in all rows."""
  numbers = {
    field
    for row in rows
    for field, value in row.items()
    if isinstance(value, int | float) and not isinstance(value, bool)
  }
  texts = {
    field
    for row in rows
    for field, value in row.items()
    if value is not None and not isinstance(value, int | float)
  }
  if metric not in numbers - texts:
    known = ", ".join(sorted(numbers - texts - {"request_id"}))
    raise ValueError(f"--metric: expected one of {known}, got {metric!r}")


def read_requests(folder: pathlib.Path) -> Rows:
  """The rows of a run's requests.jsonl by request id. Raises OSError, ValueError."""
  path = folder / "requests.jsonl"
  rows: Rows = {}
  with path.open(encoding="utf-8") as file:
    for number, line in enumerate(file, start=1):
      try:
        row = json.loads(line)
        rows[row["request_id"]] = row
      except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}:{number}: expected a request's row, got {error!r}") from error
  return rows


def recorded(folder: pathlib.Path) -> str | None:
  """The record that the run's config.json names, if it is still there."""
  try:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = config["config"]["flags"]["record"]
  except (OSError, ValueError, KeyError, TypeError):
    return None
  return name if name and pathlib.Path(name).is_file() else None


def paired_table(
  first: Rows, second: Rows, both: Sequence[int], *, resamples: int
) -> list[dict[str, Any]]:
  """A row a metric: means, mean difference B - A with its 95 % interval, and what it amounts to.

  `verdict` is "lower", "higher" or "not distinguishable" (the interval holds zero).
  """
  table = []
  for metric in METRICS:
    pairs = [(first[i].get(metric), second[i].get(metric)) for i in both]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known:
      continue
    values = np.asarray(known, dtype=np.float64)  # [pairs, 2]
    difference = values[:, 1] - values[:, 0]
    low, high = interval(difference, resamples=resamples)
    mean_a, mean_b = (float(mean) for mean in values.mean(axis=0))
    table.append(
      {
        "metric": metric,
        "pairs": len(known),
        "mean_a": mean_a,
        "mean_b": mean_b,
        "difference": float(difference.mean()),
        "ci95_low": low,
        "ci95_high": high,
        "ratio": mean_b / mean_a if mean_a else None,
        "verdict": "lower" if high < 0 else "higher" if low > 0 else "not distinguishable",
      }
    )
  return table


def interval(values: np.ndarray, *, resamples: int, seed: int = 0) -> tuple[float, float]:
  """95 % bootstrap interval of the mean of `values` [pairs]; the same seed, the same interval."""
  rng = np.random.default_rng(seed)
  count = len(values)
  means = [values[rng.integers(0, count, count)].mean() for _ in range(resamples)]
  low, high = np.percentile(means, (2.5, 97.5))
  return float(low), float(high)


def winners_and_losers(
  first: Rows, second: Rows, both: Sequence[int], *, metric: str, most: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """The requests that B improved and worsened most, each with both waterfalls."""
  changes = [
    (second[i][metric] - first[i][metric], i)
    for i in both
    if first[i].get(metric) is not None and second[i].get(metric) is not None
  ]

  def shown(change: float, request_id: int) -> dict[str, Any]:
    sides = ((side, rows[request_id]) for side, rows in (("a", first), ("b", second)))
    waterfalls = {
      side: {field: row[field] for field in WATERFALL if field in row} for side, row in sides
    }
    return {"request_id": request_id, "change": change, **waterfalls}

  ordered = sorted(changes)
  won = [shown(*pair) for pair in ordered[:most] if pair[0] < 0]
  lost = [shown(*pair) for pair in reversed(ordered[len(ordered) - most :]) if pair[0] > 0]
  return won, lost


def first_divergence(first: recording.Record, second: recording.Record) -> dict[str, Any] | None:
  """The first pair of decisions whose plans differ; None when one run's are the other's.

  `same_state` says whether the policies saw the same but for the time: then they decided
  differently; else the runs had come apart before (other durations, hits, arrivals).
  """
  decisions_a, decisions_b = first.decisions(), second.decisions()
  for number in range(sys.maxsize):
    one, other = next(decisions_a, None), next(decisions_b, None)
    if one is None and other is None:
      return None
    if one is None or other is None:
      return {"decision": number, "ends": "a" if one is None else "b"}
    found = decisions.differences(one[1], other[1])
    if found:
      return {
        "decision": number,
        "same_state": decisions.same_state(one[0], other[0]),
        "view_a": decisions.describe(one[0]),
        "view_b": decisions.describe(other[0]),
        "fields": found,
      }
  return None


def _say(
  table: Sequence[Mapping[str, Any]],
  diverges: Mapping[str, Any] | None,
  won: Sequence[Mapping[str, Any]],
  lost: Sequence[Mapping[str, Any]],
  metric: str,
  *,
  recorded_both: bool,
) -> None:
  say = run_folder.say
  say(f"{'metric':20} {'A':>12} {'B':>12} {'B - A':>12}   95 % interval")
  for row in table:
    say(
      f"{row['metric']:20} {row['mean_a']:12.5g} {row['mean_b']:12.5g} {row['difference']:12.5g}"
      f"   [{row['ci95_low']:.5g}, {row['ci95_high']:.5g}] {row['verdict']}"
    )
  if not recorded_both:
    say("no first diverging decision: run both with --record=FILE")
  elif diverges is None:
    say("all decisions are the same")
  elif "ends" in diverges:
    say(
      f"all decisions are the same until {diverges['ends'].upper()} ends, at {diverges['decision']}"
    )
  else:
    state = "the same state" if diverges.get("same_state") else "other states"
    say(f"first diverging decision: {diverges['decision']} ({state})")
    say("\n".join(decisions.text(diverges.get("fields", {}))))
  for title, shown in (("won", won), ("lost", lost)):
    say(f"{title} most by {metric}:")
    for entry in shown:
      say(f"  request {entry['request_id']}: {entry['change']:+.5g}")
      for side in ("a", "b"):
        parts = (f"{field} {_short(value)}" for field, value in entry[side].items())
        say(f"    {side.upper()}: {', '.join(parts)}")


def _short(value: Any) -> str:
  return f"{value:.4g}" if isinstance(value, float) else str(value)


def with_folders(argv: Sequence[str]) -> list[str]:
  """The command line with its two bare arguments as flags."""
  bare = [arg for arg in argv if not arg.startswith("-")]
  named = [f"--{name}={folder}" for name, folder in zip(("run_a", "run_b"), bare, strict=False)]
  return [*(arg for arg in argv if arg.startswith("-")), *named, *bare[2:]]


if __name__ == "__main__":
  sys.argv[1:] = with_folders(sys.argv[1:])
  FLAGS.run(main)
