"""The storage layout experiment, small."""

import json

import pytest

from experiments import storage_layout as program


def run(capsys, tmp_path, *arguments: str) -> dict:
  argv = [f"--out={tmp_path / 'run'}", f"--folder={tmp_path}", *arguments]
  program.main(program.FLAGS.parse(argv))
  return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_it_measures_every_way(capsys, tmp_path):
  summary = run(
    capsys, tmp_path, "--page_sizes=16,1", "--segment_bytes=4194304", "--total_bytes=8000000",
    "--repeats=1", "--num_layers=32",
  )  # fmt: skip
  assert [row["page_size"] for row in summary["rows"]] == [16, 1]
  for row in summary["rows"]:
    assert row["page_bytes"] == row["num_layers"] * row["fragment_bytes"]
    speeds = {name: value for name, value in row.items() if name.endswith("_gbps")}
    assert len(speeds) == 9
    assert all(value > 0 for value in speeds.values())
  first = summary["rows"][0]
  fraction = first["page_first_read_warm_gbps"] / first["plain_read_warm_gbps"]
  assert summary["read_fraction_of_plain"] == pytest.approx(fraction)
  assert summary["page_first_over_layer_first_read"] > 1
  assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
  assert (tmp_path / "run" / "storage_layout.png").stat().st_size > 1000
  assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_impossible_sizes_are_one_line(tmp_path):
  for wrong in ("--repeats=0", "--page_sizes=0", "--dtype=int3"):
    with pytest.raises(program.flags.UsageError, match="expected"):
      program.main(program.FLAGS.parse([f"--out={tmp_path}", wrong]))


@pytest.mark.slow
@pytest.mark.alone
def test_the_store_keeps_up_with_plain_files(capsys, tmp_path):
  """Loosely: other work on the machine must not fail it, so one of five runs is enough.

  The experiment shows the figures.
  """
  least = {
    "read_fraction_of_plain": 0.45,
    "write_fraction_of_plain": 0.25,
    "page_first_over_layer_first_read": 2,
  }
  seen = []
  for _ in range(5):
    summary = run(capsys, tmp_path, "--page_sizes=16", "--segment_bytes=134217728", "--repeats=1")
    seen.append({name: summary[name] for name in least})
    if all(seen[-1][name] > value for name, value in least.items()):
      return
  raise AssertionError(seen)
