"""Recorded Claude Code conversations: token counts, times and ids of 64-token prompt blocks.

One JSON object a file. Block ids cover the FULL blocks only (`floor(in / 64)`), are local to the
file, and name a block together with everything before it. Sub-agents nest: the times of their
requests count from the time of the sub-agent's own entry.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from strata_jax.workloads import trace_fields
from strata_jax.workloads.request import Request
from strata_jax.workloads.trace_fields import TraceError
from strata_jax.workloads.workload import MAX_TOKEN_ID, TokenIds, Workload

BLOCK_TOKENS = 64
_MAX_BLOCK_ID = MAX_TOKEN_ID // BLOCK_TOKENS - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClaudeCodeRow:
  """One call of a model."""

  at_s: float  # from the start of the conversation, sub-agents included
  model: str
  input_tokens: int
  output_tokens: int
  block_ids: np.ndarray  # int32 [floor(input_tokens / 64)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Conversation:
  """All calls of one file."""

  name: str
  rows: tuple[ClaudeCodeRow, ...]  # by absolute time, file order among equal times


def read_conversation(path: pathlib.Path | str) -> Conversation:
  """One file, its sub-agents flattened into absolute times.

  Raises TraceError, naming the entry and field, for anything the format does not allow.
  """
  path = pathlib.Path(path)
  conversation = _parse(path)
  rows = list(_rows(conversation, path, "", 0.0))
  if not rows:
    raise TraceError(path, "top level", "requests", "at least one request", 0)
  rows.sort(key=lambda row: row.at_s)  # stable
  return Conversation(name=path.stem, rows=tuple(rows))


def read_conversations(
  path: pathlib.Path | str,
) -> tuple[list[Conversation], list[tuple[str, str]]]:
  """A file or a folder of them; conversations and (dropped, kept) pairs of exact duplicates.

  Two files that are equal in everything but `id` are one conversation recorded twice; counting both
  would inflate sharing, so that the later name is dropped.
  """
  path = pathlib.Path(path)
  files = sorted(path.glob("*.json")) if path.is_dir() else [path]
  if not files:
    raise FileNotFoundError(f"{path}: expected at least one .json file, got none")
  seen: dict[str, str] = {}
  conversations: list[Conversation] = []
  duplicates: list[tuple[str, str]] = []
  for file in files:
    content = {key: value for key, value in _parse(file).items() if key != "id"}
    fingerprint = json.dumps(content, sort_keys=True)
    if fingerprint in seen:
      duplicates.append((file.stem, seen[fingerprint]))
      continue
    seen[fingerprint] = file.stem
    conversations.append(read_conversation(file))
  return conversations, duplicates


def requests(conversations: Sequence[Conversation]) -> Iterator[Request]:
  """All conversations at once, from time 0 each, in order of time; ids distinct between files.

  The tail of a prompt behind its last full block has no id in the trace: it gets ids of its own,
  shared with nobody. Requests of different models share nothing (`adapter` is the model).
  """
  offsets: list[int] = []
  first = 0
  for conversation in conversations:
    offsets.append(first)
    first += BLOCK_TOKENS * (1 + max(_top_block(row) for row in conversation.rows))
  fresh = TokenIds(first=first)
  entries = [
    (row.at_s, index, row)
    for index, conversation in enumerate(conversations)
    for row in conversation.rows
  ]
  entries.sort(key=lambda entry: entry[:2])  # stable: file order among equal times
  for request_id, (at_s, index, row) in enumerate(entries):
    prompt_ids = np.concatenate(
      [
        expand(row.block_ids) + np.int32(offsets[index]),
        fresh.take(row.input_tokens % BLOCK_TOKENS),
      ]
    )
    output_ids = fresh.take(max(1, row.output_tokens))
    yield Request(
      request_id=request_id, prompt_ids=prompt_ids, max_new_tokens=len(output_ids), arrival_s=at_s,
      adapter=row.model, tenant=conversations[index].name, forced_output_ids=output_ids,
    )  # fmt: skip


def load(path: pathlib.Path | str, limit: int | None = None) -> Workload:
  """A file or folder as a workload; `limit` keeps the first requests by time."""
  conversations, duplicates = read_conversations(path)
  kept = list(requests(conversations))[:limit]
  empty = sum(1 for c in conversations for row in c.rows if row.output_tokens == 0)
  return Workload(
    name="claude_code",
    requests=tuple(kept),
    notes={
      "conversations": len(conversations),
      "duplicate_conversations_dropped": ", ".join(f"{a} (= {b})" for a, b in duplicates),
      "requests_without_output_given_one_token": empty,
    },
  )


def expand(block_ids: np.ndarray) -> np.ndarray:
  """Each block id as 64 token ids of its own; int32 [64 * blocks]."""
  offsets = np.arange(BLOCK_TOKENS, dtype=np.int32)
  return (block_ids[:, None] * np.int32(BLOCK_TOKENS) + offsets).reshape(-1)


def _top_block(row: ClaudeCodeRow) -> int:
  return int(row.block_ids.max()) if len(row.block_ids) else 0


def _parse(path: pathlib.Path) -> dict[str, Any]:
  conversation = trace_fields.parse_object(path.read_bytes(), path)
  block_tokens = trace_fields.take_int(conversation, "block_size", path, "top level", minimum=1)
  if block_tokens != BLOCK_TOKENS:
    raise TraceError(path, "top level", "block_size", str(BLOCK_TOKENS), block_tokens)
  return conversation


def _rows(
  owner: dict[str, Any], path: pathlib.Path, prefix: str, start_s: float
) -> Iterable[ClaudeCodeRow]:
  entries = owner.get("requests", trace_fields.MISSING)
  if not isinstance(entries, list):
    raise TraceError(path, prefix or "top level", "requests", "a list", entries)
  for index, entry in enumerate(entries):
    where = f"{prefix}requests[{index}]"
    if not isinstance(entry, dict):
      raise TraceError(path, where, "entry", "a JSON object", entry)
    at_s = start_s + trace_fields.take_seconds(entry, "t", path, where)
    kind = entry.get("type", trace_fields.MISSING)
    if kind == "subagent":
      yield from _rows(entry, path, f"{where}.", at_s)
      continue
    if kind not in ("n", "s"):
      raise TraceError(path, where, "type", "'n', 's' or 'subagent'", kind)
    model = entry.get("model", trace_fields.MISSING)
    if not isinstance(model, str):
      raise TraceError(path, where, "model", "a name", model)
    input_tokens = trace_fields.take_int(entry, "in", path, where, minimum=1)
    block_ids = trace_fields.take_ids(
      entry, "hash_ids", path, where, count=input_tokens // BLOCK_TOKENS,
      rule=f"floor(in / {BLOCK_TOKENS})", maximum=_MAX_BLOCK_ID,
    )  # fmt: skip
    yield ClaudeCodeRow(
      at_s=at_s, model=model, input_tokens=input_tokens,
      output_tokens=trace_fields.take_int(entry, "out", path, where),
      block_ids=np.array(block_ids, dtype=np.int32),
    )  # fmt: skip
