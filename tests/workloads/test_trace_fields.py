import json
import pathlib

import pytest

from strata_jax.workloads import (
  loogle_documents,
  prompts_file,
  trace_fields,
  traces_claude_code,
  traces_mooncake,
)
from strata_jax.workloads.trace_fields import TraceError

BAD = {
  "no UTF-8": b'{"a": "\xff"}',
  "no JSON": b"{",
  "nested": b"[" * 100_000 + b"]" * 100_000,
  "a list": b"[1]",
  "a field twice": b'{"a": 1, "a": 2}',
}
READERS = {
  "mooncake": traces_mooncake.read_rows,
  "claude_code": traces_claude_code.read_conversation,
  "loogle": loogle_documents.read_documents,
  "prompts": lambda path: prompts_file.read_prompts(
    path, encode=None, vocab_size=8, max_new_tokens=1
  ),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", BAD)
def test_every_reader_names_the_file_and_the_place(tmp_path, name, kind):
  path = tmp_path / "bad.json"
  path.write_bytes(BAD[kind] + b"\n")
  with pytest.raises(TraceError, match=r"bad\.json, line 1, ") as caught:
    READERS[name](path)
  assert "\n" not in str(caught.value)


def test_a_good_object_is_what_json_says():
  row = {"a": [1, {"b": "ü"}], "c": None}
  data = json.dumps(row, ensure_ascii=False).encode()
  assert trace_fields.parse_object(data, pathlib.Path("x")) == row
