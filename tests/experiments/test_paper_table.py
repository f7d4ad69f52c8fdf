import json

import pytest

from experiments import flags, paper_table, sweep
from experiments.paper_claims import CLAIMS, RUNS, Figure
from experiments.sweeps.types import Options


def write(folder, run, *rows):
  (folder / run).mkdir()
  (folder / run / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_figures_are_ratios_gains_differences_or_columns():
  rows = {"r": [{"label": "a", "x": 3.0, "y": None}, {"system": "b", "x": 2.0, "y": 1.0}]}

  def value(**fields):
    return paper_table.value(Figure(run="r", row="a", **fields), rows)

  assert value(over="b", column="x") == 1.5
  assert value(over="b", column="x", minus_one=True) == 0.5
  assert value(over="b", column="x", difference=True) == 1.0
  assert value(column="x") == 3.0
  assert value(column="y") is value(over="b", column="y") is value(over="c", column="x") is None


def test_the_table_is_made_from_rows_on_file(tmp_path, capsys):
  write(tmp_path, "throughput_8b", {"system": "strata", "output_tokens_per_s": 30.0},
        {"system": "hicache_paper", "output_tokens_per_s": 10.0})  # fmt: skip
  paper_table.main(paper_table.FLAGS.parse([f"--results={tmp_path}"]))
  summary = json.loads(capsys.readouterr().out.splitlines()[-1])
  table = json.loads((tmp_path / "paper_vs_ours.json").read_text())
  assert summary["rows"] == table
  assert len(table) == len(CLAIMS) == summary["claims"]
  assert table[0]["published"] == 3.2
  assert table[0]["ours"] == 3.0
  assert [row["ours"] for row in table[1:3]] == [None, None]
  assert all(row["why"] for row in table)
  for row in table:
    assert (row["missing"] is None) == (row["ours"] is not None)
  assert table[0]["missing"] is None
  assert table[1]["missing"] == "not run: throughput_8b was made without vllm_lmcache_like"
  assert table[3]["missing"].startswith("not run: python -m experiments.sweep --name=throughput")
  assert table[-1]["missing"] == "not run: no experiment here measures it"


def test_a_row_beyond_its_target_is_infeasible_not_missing():
  rows = {"r": [{"system": "strata", "x": None}, {"system": "other", "x": 0.0}]}
  infeasible = paper_table.missing(Figure(run="r", row="strata", column="x"), rows)
  assert infeasible == "infeasible: strata does not reach the target in r"


def test_every_figure_names_a_row_that_its_run_will_have():
  for claim in CLAIMS:
    figure = claim.figure
    if figure is None:
      continue
    args = sweep.FLAGS.parse(list(RUNS[figure.run]))
    labels = {cell["label"] for cell in sweep.find(args.name).cells(args.config(Options))}
    assert figure.row in labels, claim.what
    assert figure.over is None or figure.over in labels, claim.what


def test_an_empty_folder_is_a_mistake(tmp_path):
  with pytest.raises(flags.UsageError, match=r"expected a folder with rows\.jsonl"):
    paper_table.main(paper_table.FLAGS.parse([f"--results={tmp_path}"]))
