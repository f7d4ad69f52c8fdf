"""Requests from a JSON-lines file that a user wrote.

A row a line: `{"prompt": text}` or `{"prompt_ids": [ids]}`, and as far as wanted `max_new_tokens`,
`arrival_s` (without it the request waits in the client's queue from the start), `salt`. Rows need
not be sorted by arrival; empty lines are skipped.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from strata_jax.executors.protocol import SamplingParams
from strata_jax.workloads import trace_fields
from strata_jax.workloads.request import Request
from strata_jax.workloads.trace_fields import TraceError
from strata_jax.workloads.workload import Workload

_FIELDS = ("prompt", "prompt_ids", "max_new_tokens", "arrival_s", "salt")


def read_prompts(
  path: pathlib.Path | str,
  *,
  encode: Callable[[str], np.ndarray] | None,
  vocab_size: int,
  max_new_tokens: int,
  temperature: float = 0.0,
  seed: int = 0,
  stop_token_ids: tuple[int, ...] = (),
) -> Workload:
  """Reads a prompts file.

  Args:
    path: the file.
    encode: text to token ids, int32 [tokens]; None when the model has no tokenizer, then rows need
      `prompt_ids`.
    vocab_size: bound of ids.
    max_new_tokens: for rows that do not say.
    temperature: of all requests; request i draws with `seed + i`.
    seed: see temperature.
    stop_token_ids: of all requests.

  Returns:
    Requests numbered from 0 in the order of the file.

  Raises:
    TraceError: a row that is not as described, by file, line and field.
    OSError: the file cannot be read.
  """
  path = pathlib.Path(path)
  requests: list[Request] = []
  for line, data in enumerate(path.read_bytes().splitlines(), start=1):
    if not data.strip():
      continue
    row = _row(data, path, line)
    request_id = len(requests)
    requests.append(
      Request(
        request_id=request_id,
        prompt_ids=_prompt_ids(row, path, line, encode, vocab_size),
        max_new_tokens=(
          trace_fields.take_int(row, "max_new_tokens", path, line, minimum=1)
          if "max_new_tokens" in row
          else max_new_tokens
        ),
        arrival_s=(
          trace_fields.take_seconds(row, "arrival_s", path, line) if "arrival_s" in row else None
        ),
        salt=_salt(row, path, line),
        sampling=SamplingParams(temperature=temperature, seed=seed + request_id),
        stop_token_ids=stop_token_ids,
      )
    )
  if not requests:
    raise TraceError(path, 1, "row", "at least one prompt", "an empty file")
  return Workload(name=path.stem, requests=tuple(requests))


def _row(data: bytes, path: pathlib.Path, line: int) -> Mapping[str, Any]:
  row = trace_fields.parse_object(data, path, line)
  for field in row:
    if field not in _FIELDS:
      raise TraceError(path, line, field, f"only the fields {', '.join(_FIELDS)}", row[field])
  if ("prompt" in row) == ("prompt_ids" in row):
    got = "both" if "prompt" in row else "none of them"
    raise TraceError(path, line, "prompt", "one of prompt and prompt_ids", got)
  return row


def _prompt_ids(
  row: Mapping[str, Any],
  path: pathlib.Path,
  line: int,
  encode: Callable[[str], np.ndarray] | None,
  vocab_size: int,
) -> np.ndarray:
  if "prompt" in row:
    text = row["prompt"]
    if not isinstance(text, str) or not text:
      raise TraceError(path, line, "prompt", "a text that is not empty", text)
    if encode is None:
      raise TraceError(path, line, "prompt", "prompt_ids: these weights have no tokenizer", text)
    return encode(text)
  ids = row["prompt_ids"]
  if not isinstance(ids, list) or not ids:
    raise TraceError(path, line, "prompt_ids", "a list of token ids that is not empty", ids)
  for token in ids:
    if type(token) is not int or not 0 <= token < vocab_size:
      raise TraceError(path, line, "prompt_ids", f"integers from 0 to {vocab_size - 1}", token)
  return np.asarray(ids, np.int32)


def _salt(row: Mapping[str, Any], path: pathlib.Path, line: int) -> str:
  salt = row.get("salt", "")
  if not isinstance(salt, str):
    raise TraceError(path, line, "salt", "a text", salt)
  return salt
