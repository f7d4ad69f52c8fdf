import json

import pytest

from experiments import control_plane, control_plane_tree, flags

KEYS = {
  "match_ratio_1", "match_ratio_64", "insert_ratio_1", "insert_ratio_64", "schedule_128_median_us",
  "schedule_128_p99_us", "schedule_4096_median_us",
}  # fmt: skip


def test_summary(tmp_path, capsys):
  args = control_plane.FLAGS.parse([f"--out={tmp_path}", "--tokens=6400", "--repeats=2"])
  control_plane.main(args)
  summary = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert summary.keys() >= KEYS
  assert summary == json.loads((tmp_path / "summary.json").read_text())


@pytest.mark.parametrize("page_size", [1, 16])
def test_tree_work_is_a_small_multiple_of_comparing_two_arrays(page_size):
  found = control_plane_tree.measure(page_size=page_size, repeats=40)
  assert found["match_ratio_1"] <= 4
  assert found["match_ratio_64"] <= 16
  assert found["insert_ratio_1"] <= 8
  assert found["insert_ratio_64"] <= 32


@pytest.mark.parametrize("flag", ["--tokens=100", "--tokens=0", "--page_size=0", "--repeats=0"])
def test_wrong_flags(tmp_path, flag):
  args = control_plane.FLAGS.parse([f"--out={tmp_path}", flag])
  with pytest.raises(flags.UsageError, match=flag.split("=")[0]):
    control_plane.main(args)
