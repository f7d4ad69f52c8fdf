import json

import pytest

from experiments import flags, io_bandwidth, io_bandwidth_plots, run_folder
from strata_jax.tiers import io_choice

_SMALL = ("--fragment_bytes=1024,4096",)


def rows(**changes):
  row = {
    "backend": "kernel",
    "direction": "load",
    "fragment_bytes": 4096,
    "page_bytes": 4096,
    "blocks": 2,
    "pool_bytes": 1 << 20,
    "call": "pages",
    "call_bytes": 1 << 20,
    "gbps": 50.0,
  }
  return row | changes


def test_a_run_on_a_cpu_measures_the_reference_and_says_so(tmp_path, capsys):
  io_bandwidth.main(io_bandwidth.FLAGS.parse([f"--out={tmp_path}", *_SMALL]))
  captured = capsys.readouterr()
  summary = json.loads(captured.out.splitlines()[-1])
  assert summary == json.loads((tmp_path / "summary.json").read_text())
  assert "No GPU" in captured.err
  assert "not comparable" in summary["note"]
  assert summary["ceiling_load_gbps"] > 0
  assert summary["ceiling_store_gbps"] > 0
  found = {(row["direction"], row["fragment_bytes"], row["blocks"]) for row in summary["rows"]}
  assert found == {(d, size, 0) for d in ("load", "store") for size in (1024, 4096)}
  assert all(row["backend"] == "reference" and row["gbps"] > 0 for row in summary["rows"])
  assert (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--fragment_bytes=1000", "multiples of 256"),
    ("--call_mib=0", "an integer >= 1"),
    ("--no_such_flag=1", "no_such_flag"),
    ("--renew_auto_table=on", "expected a GPU"),
  ],
)
def test_impossible_flags_are_refused(tmp_path, argument, message):
  with pytest.raises(flags.UsageError, match=message):
    io_bandwidth.main(io_bandwidth.FLAGS.parse([f"--out={tmp_path}", argument]))


def test_the_table_of_auto_takes_whole_pages_of_its_candidates(tmp_path):
  summary = {
    "rows": [
      rows(page_bytes=131072),
      rows(page_bytes=131072, backend="copy_engine", direction="store"),
      rows(),  # pages of one layer
      rows(page_bytes=131072, backend="memcpy_async"),
      rows(page_bytes=131072, call="layer"),
    ]
  }
  path = tmp_path / "table.json"
  run_folder.write_json(path, io_bandwidth.auto_table(summary))
  assert [(row.backend, row.direction) for row in io_choice.read_table(path)] == [
    ("kernel", "load"),
    ("copy_engine", "store"),
  ]


def test_both_plots_are_drawn(tmp_path):
  summary = {
    "ceiling_load_gbps": 55.0,
    "ceiling_store_gbps": 55.0,
    "rows": [rows(blocks=blocks, direction=d) for blocks in (1, 2) for d in ("load", "store")],
  }
  io_bandwidth_plots.draw(tmp_path, summary)
  assert {path.name for path in tmp_path.glob("*.png")} == {"by_fragment.png", "by_blocks.png"}
