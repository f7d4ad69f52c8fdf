"""Throughput at equal mean TTFT out of measured points.

  python -m experiments.throughput_table --runs=runs/throughput --out=results/h200

Writes `throughput_at_ttft.json` and `throughput_at_ttft.png` to --out. How a crossing is found says
`experiments/sweeps/crossing.py`. Several folders of one config count as more repeats; ratios are
taken within a repeat.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments import flags, plots, run_files, run_folder, throughput_folder
from experiments.sweeps import crossing, throughput, throughput_at_ttft

FLAGS = flags.FlagSet("Makes the table of throughput at equal mean TTFT.")
FLAGS.add_flag("runs", tuple[str, ...], (), "folders that `throughput` wrote")
FLAGS.add_flag("targets", tuple[float, ...], throughput.TARGETS, "T*, in multiples of T_ref")
FLAGS.add_flag("baseline", str, throughput_at_ttft.BASELINE, "system that ratios are taken to")
FLAGS.add_flag("out", str, "runs/throughput_table", "folder for the table and the plot")

_FIELDS = (
  "system", "repeat", "rate_rps", "ttft_mean_s", "drain_s", "arrival_span_s", "lost",
  *crossing.KEPT,
)  # fmt: skip


def main(args: flags.Args) -> None:
  """Makes the table."""
  if not args.runs:
    raise flags.UsageError("--runs: expected at least one folder, got none")
  if not args.targets or min(args.targets) <= 0:
    raise flags.UsageError(f"--targets: expected numbers > 0, got {args.targets}")
  points, facts = _read(args.runs)
  names = list(dict.fromkeys(row["system"] for row in points))
  if args.baseline not in names:
    if args.given("baseline"):
      raise flags.UsageError(
        f"--baseline: expected one of {', '.join(names)}, got {args.baseline!r}"
      )
    run_folder.say(f"no ratios: no points of {args.baseline}; --baseline takes {', '.join(names)}")
  reference_s = throughput_folder.reference_ttft_s(points)
  if reference_s is None:
    raise flags.UsageError("--runs: expected points with reference_ttft_s, got none")
  targets_s = {multiple: multiple * reference_s for multiple in sorted(args.targets)}
  table: dict[str, Any] = {
    "t_ref_s": reference_s,
    "baseline": args.baseline,
    "headline_t_star_of_t_ref": throughput.HEADLINE,
    "points": len(points),
    "rows": crossing.table(points, targets_s, args.baseline),
    **facts,
  }
  out = pathlib.Path(args.out)
  with flags.usage_errors():
    out.mkdir(parents=True, exist_ok=True)
    run_folder.write_json(out / "throughput_at_ttft.json", table)
  plots.lines(
    out / "throughput_at_ttft.png", _curves(points), "mean TTFT, seconds", "output tokens/s",
    log_x=True,
  )  # fmt: skip
  width = max(len(row["system"]) for row in table["rows"])
  for row in table["rows"]:
    run_folder.say(_line(row, width))
  print(json.dumps(run_folder.plain(table), allow_nan=False), flush=True)


def _read(folders: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
  """The points of all folders, whose repeats get names of their own, and what they share."""
  points: list[dict[str, Any]] = []
  configs: list[dict[str, Any]] = []
  for index, name in enumerate(folders):
    path = pathlib.Path(name)
    with flags.usage_errors():
      rows = throughput_folder.read_points(path / "points.jsonl")
      configs.append(run_files.read_json(path / "config.json"))
      for field in ("config", "commands"):
        run_files.need(configs[-1], path / "config.json", field)
    if configs[-1]["config"] != configs[0]["config"]:
      raise flags.UsageError(
        f"--runs: expected folders of one config, got {name} beside {folders[0]}"
      )
    for number, row in enumerate(rows, 1):
      if missing := [field for field in _FIELDS if field not in row]:
        raise flags.UsageError(
          f"{path / 'points.jsonl'}, line {number}: expected the field {missing[0]!r}, got none"
        )
      repeat = row["repeat"] if len(folders) == 1 else f"{index}.{row['repeat']}"
      points.append({**row, "repeat": repeat})
  if not points:
    raise flags.UsageError(f"--runs: expected points, got none in {', '.join(folders)}")
  commands = [command for config in configs for command in config["commands"]]
  return points, {"config": configs[0]["config"], "commands": commands}


def _curves(points: Sequence[dict[str, Any]]) -> dict[str, tuple[list[float], list[float]]]:
  """Mean TTFT and throughput of each system, means of the repeats, rate by rate."""
  curves: dict[str, tuple[list[float], list[float]]] = {}
  for system in dict.fromkeys(row["system"] for row in points):
    x, y = [], []
    own = [r for r in points if r["system"] == system and not r["lost"] and r["ttft_mean_s"]]
    for rate in sorted({row["rate_rps"] for row in own}):
      rows = [row for row in own if row["rate_rps"] == rate]
      x.append(sum(row["ttft_mean_s"] for row in rows) / len(rows))
      y.append(sum(row["output_tokens_per_s"] for row in rows) / len(rows))
    curves[system] = x, y
  return curves


def _line(row: dict[str, Any], width: int) -> str:
  head = f"{row['system']:<{width}} {row['t_star_of_t_ref']:>4g} T_ref"
  if row["rate_rps"] is None:
    return f"{head}  -  {row['reason']}"
  ratio = row["ratio_to_baseline"]
  text = "-" if ratio is None else f"{ratio:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
  return f"{head}  {row['output_tokens_per_s']:8.1f} tokens/s  {text}  {row['reason']}"


if __name__ == "__main__":
  FLAGS.run(main)
