"""Sets the published numbers of the paper beside ours, from the rows that sweeps left on file.

  python -m experiments.paper_table --results=results/simulated             # collect
  python -m experiments.paper_table --results=results/simulated --measure   # run what is missing

Writes `paper_vs_ours.json` into the folder of the results.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import flags, run_folder, sweep
from experiments.paper_claims import CLAIMS, RUNS, Claim, Figure, Rows

FLAGS = flags.FlagSet("Sets published numbers beside ours.")
FLAGS.add_flag("results", str, "results/simulated", "folder with one folder a run")
FLAGS.add_flag("measure", bool, False, "run the sweeps that have no rows yet")
FLAGS.add_flag("workers", int, 2, "processes of a sweep")


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  folder = pathlib.Path(args.results)
  if args.measure:
    for run, argv in RUNS.items():
      if not (folder / run / "rows.jsonl").exists():
        run_folder.say(f"measures {run}: {' '.join(argv)}")
        sweep.main(sweep.FLAGS.parse([*argv, f"--out={folder / run}", f"--workers={args.workers}"]))
  with flags.usage_errors():
    rows = read_rows(folder)
    if not rows:
      raise ValueError(f"--results: expected a folder with rows.jsonl of runs, got {folder}")
  table = [entry(claim, rows, commands(folder)) for claim in CLAIMS]
  (folder / "paper_vs_ours.json").write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n")
  run_folder.say(sweep.text_table([{k: v for k, v in row.items() if k != "why"} for row in table]))
  known = [row for row in table if row["ours"] is not None]
  run_folder.finish(folder, {"claims": len(table), "measured": len(known), "rows": table})


def read_rows(folder: pathlib.Path) -> Rows:
  """Run -> rows, of the runs that are on file."""
  return {
    path.parent.name: [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for path in sorted(folder.glob("*/rows.jsonl"))
  }


def commands(folder: pathlib.Path) -> dict[str, str]:
  """Run -> the flags it was made with."""
  return {
    path.parent.name: " ".join(json.loads(path.read_text("utf-8"))["command"])
    for path in sorted(folder.glob("*/config.json"))
  }


def entry(claim: Claim, rows: Rows, made_by: Mapping[str, str]) -> dict[str, Any]:
  """A line of the table; `ours` is None where no run has it, and `missing` says why."""
  ours = None if claim.figure is None else value(claim.figure, rows)
  source = None if claim.figure is None else claim.figure.run
  return {
    "what": claim.what, "published": claim.published, "ours": ours, "run": source,
    "command": None if source is None else made_by.get(source),
    "missing": None if ours is not None else missing(claim.figure, rows),
    "why": claim.differs,
  }  # fmt: skip


def missing(figure: Figure | None, rows: Rows) -> str:
  """Why there is no figure of ours."""
  if figure is None:
    return "not run: no experiment here measures it"
  if figure.run not in rows:
    argv = " ".join(RUNS[figure.run])
    return f"not run: python -m experiments.sweep {argv} --out=results/simulated/{figure.run}"
  for label in (figure.row, figure.over):
    if label is None:
      continue
    found = [row for row in rows[figure.run] if label in (row.get("label"), row.get("system"))]
    if not found:
      return f"not run: {figure.run} was made without {label}"
    if _column(found, label, figure.column) is None:
      return f"infeasible: {label} does not reach the target in {figure.run}"
  return f"{figure.over} is 0 in {figure.run}"


def value(figure: Figure, rows: Rows) -> float | None:
  """Our figure; None when a row is missing or infeasible."""
  found = rows.get(figure.run, ())
  mine = _column(found, figure.row, figure.column)
  if figure.over is None or mine is None:
    return mine
  other = _column(found, figure.over, figure.column)
  if other is None or (not other and not figure.difference):
    return None
  if figure.difference:
    return mine - other
  return mine / other - (1.0 if figure.minus_one else 0.0)


def _column(rows: Sequence[Mapping[str, Any]], label: str, column: str) -> float | None:
  for row in rows:
    if label in (row.get("label"), row.get("system")):
      return row.get(column)
  return None


if __name__ == "__main__":
  FLAGS.run(main)
