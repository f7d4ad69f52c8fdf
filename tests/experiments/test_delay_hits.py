import json

import pytest

from experiments import delay_hits, flags


def test_rows_are_normalised_by_resolve_zero(tmp_path, capsys):
  argv = ["--limit=200", "--rates=10", "--resolve_ms=0,1000", "--block_tokens=512"]
  delay_hits.main(delay_hits.FLAGS.parse([f"--out={tmp_path}", *argv]))
  summary = json.loads(capsys.readouterr().out.splitlines()[-1])
  none, slow = summary["rows"]
  assert none["normalised_hit_rate"] == 1.0
  assert slow["hit_rate"] / none["hit_rate"] == slow["normalised_hit_rate"] < 1.0
  assert (tmp_path / "delay_hits.png").exists()


@pytest.mark.parametrize(
  "argv", [["--rates=0"], ["--resolve_ms=-1"], ["--block_tokens=0"], ["--workload=none"]]
)
def test_mistakes_get_one_line(tmp_path, argv):
  with pytest.raises(flags.UsageError, match="expected"):
    delay_hits.main(delay_hits.FLAGS.parse([f"--out={tmp_path}", *argv]))
