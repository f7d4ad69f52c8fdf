import json

import pytest

from experiments import executor_bench, flags
from experiments.executor_bench import FLAGS, BenchConfig, main


@pytest.mark.slow
def test_a_tiny_model_runs(tmp_path, capsys):
  main(FLAGS.parse([f"--out={tmp_path}"]))
  summary = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert [row["loads"] for row in summary["beside"]] == ["auto/layer", "auto/whole"]
  assert len(summary["prefill"]) == len(summary["decode"]) == 1
  assert len(summary["beside_decode"]) == 2
  for row in (*summary["beside"], *summary["beside_decode"]):
    assert row["over_max"] == row["both_ms"] / max(row["compute_ms"], row["load_ms"])
  assert (tmp_path / "config.json").exists()


def test_flops_and_bytes_of_a_known_model():
  bench = executor_bench.Bench.__new__(executor_bench.Bench)
  bench._model = executor_bench.config_lib.MODELS["llama31_8b"]
  assert bench._weight_bytes() == pytest.approx(2 * 7.5e9, rel=0.01)
  assert bench._flops(1) == pytest.approx(2 * 6.98e9, rel=0.01)


def test_an_unknown_model_is_refused_on_any_device(tmp_path):
  with pytest.raises(flags.UsageError, match="--model: expected one of"):
    main(FLAGS.parse(["--model=gpt", f"--out={tmp_path}"]))


def test_an_unknown_model_is_refused():
  with pytest.raises(ValueError, match="model: expected one of"):
    BenchConfig(model="gpt")
