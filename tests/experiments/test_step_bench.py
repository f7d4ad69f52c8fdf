import json

import numpy as np
import pytest

from experiments import flags, model_bench, step_bench
from experiments.step_bench import FLAGS, StepBenchConfig, main


@pytest.mark.slow
def test_a_tiny_model_runs(tmp_path, capsys):
  main(FLAGS.parse([f"--out={tmp_path}", "--attentions=xla"]))
  rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
  names = "joint_tokens", "decodes", "rows_a_context", "prompts"
  alone = [(0, 0, 1, 1), (0, 2, 1, 0), (0, 2, 1, 1), (0, 2, 2, 0), (0, 2, 2, 1)]
  joint = [(32, 2, 1, 1), (32, 2, 2, 1)]
  assert [tuple(row[name] for name in names) for row in rows] == alone + joint
  assert all(row["step_ms"] > 0 and row["busy_ms"] is None for row in rows)


def test_rows_of_a_context_have_its_whole_pages_in_common_and_others_of_their_own():
  bench = step_bench.StepBench.__new__(step_bench.StepBench)
  bench._config = StepBenchConfig(page_size=4, context_tokens=10, question_tokens=6)
  bench._context_pages, bench._own_pages = 3, 3
  bench._pages = np.arange(24)
  tables = [bench._table(row, row % 2) for row in range(4)]
  assert all(len(table) == 6 for table in tables)
  assert (tables[0][:2] == tables[2][:2]).all()
  own = np.concatenate([table[2:] for table in tables])
  assert len(set(own)) == len(own)
  assert not set(own) & set(tables[0][:2])
  assert not set(tables[0]) & set(tables[1])


def test_more_decodes_than_shapes_hold_are_refused():
  with pytest.raises(ValueError, match="decodes: expected at most running_requests 4"):
    StepBenchConfig(decodes=(5,), running_requests=4)


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["--attentions=xla,foo"], "^attention: expected one of .*auto, got 'foo'$"),
    (["--attentions=cudnn"], "^attention 'cudnn': expected a GPU"),
    (
      ["--decodes=3"],
      r"^--decodes: expected at most running_requests 2, got \(3,\) \(without a GPU",
    ),
  ],
)
def test_mistakes_get_one_line(tmp_path, argv, message):
  with pytest.raises(flags.UsageError, match=message):
    main(FLAGS.parse([f"--out={tmp_path}", *argv]))


def test_the_model_that_runs_is_told(tmp_path, capsys):
  args = FLAGS.parse([f"--out={tmp_path}", "--model=smollm2_135m"])
  model_bench.begin(args, "bench", StepBenchConfig, step_bench._TINY)
  assert "No GPU: smollm2_135m runs" in capsys.readouterr().err
