import copy
import json

import numpy as np
import pytest

from strata_jax.workloads import traces_claude_code
from strata_jax.workloads.trace_fields import TraceError
from tests.shared_data import shared_data


def request(t=0.0, tokens=130, blocks=(1, 2), **changes):
  base = {"t": t, "type": "n", "model": "m", "in": tokens, "out": 2, "hash_ids": list(blocks)}
  return {**base, **changes}


def conversation(*requests):
  return {"id": "x", "block_size": 64, "hash_id_scope": "local", "requests": list(requests)}


def write(tmp_path, content, name="a.json"):
  path = tmp_path / name
  path.write_text(json.dumps(content))
  return path


def reused_blocks(path):
  """Blocks that a prefix cache without limit reuses, by the loader's own rows."""
  conversations, _ = traces_claude_code.read_conversations(path)
  reused = 0
  for entry in conversations:
    seen = set()
    for row in entry.rows:
      hit = 0
      for block in row.block_ids.tolist():
        if block not in seen:
          break
        hit += 1
      reused += hit
      seen.update(row.block_ids.tolist())
  return reused


def test_blocks_round_down_and_the_tail_is_shared_with_nobody(tmp_path):
  path = write(tmp_path, conversation(request(), request(t=1.0)))
  first, second = traces_claude_code.load(path).requests
  assert len(first.prompt_ids) == 130
  np.testing.assert_array_equal(first.prompt_ids[:128], second.prompt_ids[:128])
  assert not set(first.prompt_ids[128:].tolist()) & set(second.prompt_ids[128:].tolist())


def test_subagents_nest_and_their_times_are_relative(tmp_path):
  agent = {"type": "subagent", "t": 10.0, "requests": [request(t=5.0), request(t=1.0)]}
  outer = {"type": "subagent", "t": 2.0, "requests": [agent, request(t=3.0)]}
  path = write(tmp_path, conversation(request(t=0.0), outer, request(t=14.0)))
  times = [row.at_s for row in traces_claude_code.read_conversation(path).rows]
  assert times == [0.0, 5.0, 13.0, 14.0, 17.0]


def test_models_share_nothing_and_files_share_nothing(tmp_path):
  write(tmp_path, conversation(request(), request(t=1.0, model="n")), "a.json")
  write(tmp_path, conversation(request(t=0.5)), "b.json")
  a, b, c = traces_claude_code.load(tmp_path).requests
  assert (a.adapter, b.adapter, c.adapter) == ("m", "m", "n")
  assert (a.tenant, b.tenant, c.tenant) == ("a", "b", "a")
  assert not set(a.prompt_ids.tolist()) & set(b.prompt_ids.tolist())


def test_a_copy_of_a_conversation_is_dropped_and_noted(tmp_path):
  content = conversation(request())
  write(tmp_path, content, "a.json")
  write(tmp_path, {**copy.deepcopy(content), "id": "y"}, "b.json")
  write(tmp_path, conversation(request(tokens=129)), "c.json")
  workload = traces_claude_code.load(tmp_path)
  assert len(workload.requests) == 2
  assert workload.notes["duplicate_conversations_dropped"] == "b (= a)"


def test_no_output_gives_one_token_and_a_note(tmp_path):
  workload = traces_claude_code.load(write(tmp_path, conversation(request(out=0), request(t=1.0))))
  assert [len(r.forced_output_ids) for r in workload.requests] == [1, 2]
  assert workload.notes["requests_without_output_given_one_token"] == 1


@pytest.mark.parametrize(
  ("change", "field"),
  [
    ({"t": -1.0}, "t"),
    ({"t": float("nan")}, "t"),
    ({"t": None}, "t"),
    ({"t": True}, "t"),
    ({"type": "x"}, "type"),
    ({"model": 3}, "model"),
    ({"in": "130"}, "in"),
    ({"in": 0, "hash_ids": []}, "in"),
    ({"out": -1}, "out"),
    ({"hash_ids": [1, 2, 3]}, "hash_ids"),  # ceil instead of floor
    ({"hash_ids": [1]}, "hash_ids"),
    ({"hash_ids": [1, -2]}, "hash_ids"),
    ({"hash_ids": "12"}, "hash_ids"),
  ],
)
def test_a_bad_field_is_named_with_its_entry(tmp_path, change, field):
  agent = {"type": "subagent", "t": 1.0, "requests": [request(**change)]}
  path = write(tmp_path, conversation(request(), agent))
  with pytest.raises(
    TraceError, match=rf"a\.json, requests\[1\]\.requests\[0\], {field}: expected"
  ):
    traces_claude_code.read_conversation(path)


def test_another_block_size_no_requests_and_no_json_are_errors(tmp_path):
  with pytest.raises(TraceError, match="block_size"):
    traces_claude_code.read_conversation(write(tmp_path, {**conversation(), "block_size": 32}))
  with pytest.raises(TraceError, match="at least one request"):
    traces_claude_code.read_conversation(write(tmp_path, conversation()))
  (tmp_path / "a.json").write_text('{"id":\n ?}')
  with pytest.raises(TraceError, match="line 2"):
    traces_claude_code.read_conversation(tmp_path / "a.json")
  (tmp_path / "empty").mkdir()
  with pytest.raises(FileNotFoundError, match=r"at least one \.json"):
    traces_claude_code.load(tmp_path / "empty")


@pytest.mark.parametrize(
  ("name", "requests", "inputs", "outputs", "reused"),
  [
    ("trace_0038", 21, 2_578_972, 26_098, 32_928),
    ("trace_0091", 10, 1_284_267, 1_447, 18_030),
    ("trace_0202", 55, 2_505_550, 18_008, 37_789),
    ("trace_0291", 32, 2_254_119, 19_504, 31_603),
    ("trace_0331", 42, 2_299_595, 22_674, 34_480),
    ("trace_0504", 3, 33_739, 337, 343),
    ("trace_0732", 84, 3_732_001, 41_266, 56_635),
  ],
)
def test_the_published_files_have_the_published_totals(name, requests, inputs, outputs, reused):
  path = shared_data(f"claude_code/{name}.json")
  rows = traces_claude_code.read_conversation(path).rows
  assert len(rows) == requests
  assert sum(row.input_tokens for row in rows) == inputs
  assert sum(row.output_tokens for row in rows) == outputs
  assert reused_blocks(path) == reused


def test_the_published_folder_without_its_duplicate():
  workload = traces_claude_code.load(shared_data("claude_code"))
  assert len(workload.requests) == 350 - 36
  assert workload.notes["duplicate_conversations_dropped"] == "trace_0426 (= trace_0398)"
  assert workload.notes["requests_without_output_given_one_token"] == 1
  times = [r.arrival_s for r in workload.requests]
  assert times == sorted(times)
