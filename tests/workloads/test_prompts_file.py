import json

import numpy as np
import pytest

from strata_jax.workloads import prompts_file
from strata_jax.workloads.trace_fields import TraceError


def _encode(text):
  return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def _read(path, **changes):
  options = {"encode": _encode, "vocab_size": 300, "max_new_tokens": 7} | changes
  return prompts_file.read_prompts(path, **options)


def _write(path, *rows):
  path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))
  return path


def test_rows_with_text_and_with_ids(tmp_path):
  path = _write(
    tmp_path / "mine.jsonl",
    {"prompt": "añ"},
    "",
    {"prompt_ids": [1, 299], "max_new_tokens": 3, "arrival_s": 2, "salt": "a"},
  )
  workload = _read(path, temperature=0.5, seed=10, stop_token_ids=(2,))
  first, second = workload.requests
  assert workload.name == "mine"
  assert first.prompt_ids.tolist() == [97, 195, 177]
  assert first.prompt_ids.dtype == np.int32
  assert (first.max_new_tokens, first.arrival_s, first.salt) == (7, None, "")
  assert second.prompt_ids.tolist() == [1, 299]
  assert (second.max_new_tokens, second.arrival_s, second.salt) == (3, 2.0, "a")
  assert [r.request_id for r in workload.requests] == [0, 1]
  assert [r.sampling.seed for r in workload.requests] == [10, 11]
  assert second.stop_token_ids == (2,)


@pytest.mark.parametrize(
  ("row", "field"),
  [
    ("{", "row"),
    ("[1]", "row"),
    ({}, "prompt"),
    ({"prompt": "a", "prompt_ids": [1]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt_ids": []}, "prompt_ids"),
    ({"prompt_ids": "12"}, "prompt_ids"),
    ({"prompt_ids": [1, 300]}, "prompt_ids"),
    ({"prompt_ids": [-1]}, "prompt_ids"),
    ({"prompt_ids": [True]}, "prompt_ids"),
    ({"prompt_ids": [1.0]}, "prompt_ids"),
    ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens"),
    ({"prompt": "a", "max_new_tokens": "3"}, "max_new_tokens"),
    ({"prompt": "a", "arrival_s": -1}, "arrival_s"),
    ('{"prompt": "a", "arrival_s": NaN}', "arrival_s"),
    ({"prompt": "a", "arrival_s": "1"}, "arrival_s"),
    ({"prompt": "a", "salt": 3}, "salt"),
    ({"prompt": "a", "promt": "b"}, "promt"),
  ],
)
def test_a_bad_row_is_refused_naming_file_line_and_field(tmp_path, row, field):
  path = _write(tmp_path / "bad.jsonl", {"prompt": "good"}, row)
  with pytest.raises(TraceError, match=rf"bad\.jsonl, line 2, {field}: expected "):
    _read(path)


def test_a_text_prompt_needs_a_tokenizer(tmp_path):
  path = _write(tmp_path / "text.jsonl", {"prompt": "a"})
  with pytest.raises(TraceError, match=r"line 1, prompt: expected prompt_ids: .* no tokenizer"):
    _read(path, encode=None)


def test_bytes_that_are_no_utf8_are_refused(tmp_path):
  path = tmp_path / "latin.jsonl"
  path.write_bytes(b'{"prompt": "\xe9"}\n')
  with pytest.raises(TraceError, match="line 1, row: expected a JSON object in UTF-8"):
    _read(path)


def test_an_empty_file_is_refused(tmp_path):
  with pytest.raises(TraceError, match="at least one prompt"):
    _read(_write(tmp_path / "empty.jsonl", ""))
