import json

import numpy as np
import pytest

from strata_jax.workloads import traces_mooncake
from strata_jax.workloads.trace_fields import TraceError
from tests.shared_data import shared_data

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}


def write(tmp_path, *rows):
  path = tmp_path / "trace.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def test_expands_a_block_id_to_its_own_512_tokens_and_cuts_to_the_length(tmp_path):
  rows = traces_mooncake.read_rows(write(tmp_path, {**GOOD, "hash_ids": [7, 9]}))
  expected = np.concatenate([np.arange(7 * 512, 8 * 512), np.arange(9 * 512, 9 * 512 + 88)])
  np.testing.assert_array_equal(rows[0].prompt_ids(), expected)
  assert rows[0].prompt_ids().dtype == np.int32


def test_outputs_are_forced_ids_that_no_prompt_and_no_other_output_has(tmp_path):
  path = write(tmp_path, GOOD, {**GOOD, "hash_ids": [0, 5]})
  workload = traces_mooncake.load(path)
  prompts = np.concatenate([r.prompt_ids for r in workload.requests])
  outputs = np.concatenate([r.forced_output_ids for r in workload.requests])
  assert len(outputs) == 6 == len(set(outputs.tolist()))
  assert not set(outputs.tolist()) & set(prompts.tolist())


def test_equal_timestamps_keep_file_order(tmp_path):
  path = write(tmp_path, GOOD, {**GOOD, "hash_ids": [0, 2]}, {**GOOD, "hash_ids": [0, 3]})
  seconds = [int(r.prompt_ids[-1]) // 512 for r in traces_mooncake.load(path).requests]
  assert seconds == [1, 2, 3]


def test_no_output_gives_one_token_and_a_note(tmp_path):
  workload = traces_mooncake.load(write(tmp_path, {**GOOD, "output_length": 0}, GOOD))
  assert [len(r.forced_output_ids) for r in workload.requests] == [1, 3]
  assert workload.notes["requests_without_output_given_one_token"] == 1


@pytest.mark.parametrize(
  ("change", "field"),
  [
    ({"timestamp": None}, "timestamp"),
    ({"timestamp": -1}, "timestamp"),
    ({"timestamp": float("nan")}, "timestamp"),
    ({"timestamp": "0"}, "timestamp"),
    ({"timestamp": True}, "timestamp"),
    ({"timestamp": 1}, "timestamp"),  # the row before is later
    ({"input_length": "600"}, "input_length"),
    ({"input_length": 0}, "input_length"),
    ({"input_length": 600.0}, "input_length"),
    ({"output_length": -1}, "output_length"),
    ({"hash_ids": [0]}, "hash_ids"),
    ({"hash_ids": [0, 1, 2]}, "hash_ids"),
    ({"hash_ids": [0, -1]}, "hash_ids"),
    ({"hash_ids": [0, "1"]}, "hash_ids"),
    ({"hash_ids": [0, 1 << 30]}, "hash_ids"),
    ({"hash_ids": None}, "hash_ids"),
  ],
)
def test_a_bad_field_is_named_with_file_and_line(tmp_path, change, field):
  path = write(tmp_path, {**GOOD, "timestamp": 5}, {**GOOD, "timestamp": 5, **change})
  with pytest.raises(TraceError, match=rf"trace\.jsonl, line 2, {field}: expected"):
    traces_mooncake.read_rows(path)


@pytest.mark.parametrize("text", ["\n", "[1]\n", "{\n", ""])
def test_a_row_that_is_no_object_is_an_error(tmp_path, text):
  path = tmp_path / "trace.jsonl"
  path.write_text(text)
  with pytest.raises(TraceError, match=r"line 1, row"):
    traces_mooncake.read_rows(path)


def test_a_missing_field_is_an_error(tmp_path):
  row = {key: value for key, value in GOOD.items() if key != "output_length"}
  with pytest.raises(TraceError, match=r"line 1, output_length: .*'nothing'"):
    traces_mooncake.read_rows(write(tmp_path, row))


def test_limit_stops_reading_before_a_later_error(tmp_path):
  path = write(tmp_path, GOOD, {**GOOD, "timestamp": -1})
  assert len(traces_mooncake.read_rows(path, limit=1)) == 1


def test_the_published_trace_has_the_published_totals():
  rows = traces_mooncake.read_rows(shared_data("mooncake/conversation_trace.jsonl"))
  assert len(rows) == 12031
  assert sum(row.input_tokens for row in rows) == 144_793_823
  assert sum(row.output_tokens for row in rows) == 4_122_048
  assert sum(len(row.block_ids) for row in rows) == 288_500
