"""The Mooncake traces: arrivals, lengths and ids of 512-token prompt blocks.

One JSON object a line: `timestamp` (milliseconds), `input_length`, `output_length`, `hash_ids` with
one id for each block of 512 prompt tokens, the last one also when it is only partly filled. An id
names a block together with everything before it (Qin et al., FAST 2025).
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from strata_jax.workloads import trace_fields
from strata_jax.workloads.request import Request
from strata_jax.workloads.trace_fields import TraceError
from strata_jax.workloads.workload import MAX_TOKEN_ID, TokenIds, Workload

BLOCK_TOKENS = 512
_MAX_BLOCK_ID = MAX_TOKEN_ID // BLOCK_TOKENS - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MooncakeRow:
  """One request of the trace."""

  timestamp_ms: float
  input_tokens: int
  output_tokens: int
  block_ids: np.ndarray  # int32 [ceil(input_tokens / 512)]

  def prompt_ids(self) -> np.ndarray:
    """The prompt, each block id expanded to 512 ids of its own; int32 [input_tokens]."""
    offsets = np.arange(BLOCK_TOKENS, dtype=np.int32)
    ids = self.block_ids[:, None] * np.int32(BLOCK_TOKENS) + offsets  # [blocks, 512]
    return ids.reshape(-1)[: self.input_tokens]


def read_rows(path: pathlib.Path | str, limit: int | None = None) -> list[MooncakeRow]:
  """The first `limit` rows, in file order (rows with equal timestamps keep it).

  Raises TraceError, naming line and field, for anything the format does not allow: fields that are
  missing or of another type, a timestamp that is negative, no number or earlier than the row
  before, lengths below 1 (output: below 0), a list of ids whose length is not
  ceil(input_length / 512).
  """
  path = pathlib.Path(path)
  rows: list[MooncakeRow] = []
  last_ms = 0.0
  with path.open("rb") as lines:
    for line, data in enumerate(lines, start=1):
      if limit is not None and len(rows) >= limit:
        break
      row = trace_fields.parse_object(data, path, line)
      timestamp_ms = trace_fields.take_seconds(row, "timestamp", path, line)
      if timestamp_ms < last_ms:
        raise TraceError(path, line, "timestamp", f"no less than the row before ({last_ms})",
                         timestamp_ms)  # fmt: skip
      last_ms = timestamp_ms
      input_tokens = trace_fields.take_int(row, "input_length", path, line, minimum=1)
      output_tokens = trace_fields.take_int(row, "output_length", path, line)
      block_ids = trace_fields.take_ids(
        row, "hash_ids", path, line, count=-(-input_tokens // BLOCK_TOKENS),
        rule=f"ceil(input_length / {BLOCK_TOKENS})", maximum=_MAX_BLOCK_ID,
      )  # fmt: skip
      rows.append(
        MooncakeRow(
          timestamp_ms=timestamp_ms,
          input_tokens=input_tokens,
          output_tokens=output_tokens,
          block_ids=np.array(block_ids, dtype=np.int32),
        )
      )
  if not rows:
    raise TraceError(path, 1, "row", "at least one row", "an empty file")
  return rows


def requests(rows: Sequence[MooncakeRow]) -> Iterator[Request]:
  """The rows as requests, one at a time: prompts are expanded only when asked for.

  Outputs are forced ids that no prompt block has. A row without output gets one output token: the
  one that its prefill gives.
  """
  top_block = max(int(row.block_ids.max()) for row in rows)
  outputs = TokenIds(first=(top_block + 1) * BLOCK_TOKENS)
  for request_id, row in enumerate(rows):
    output_ids = outputs.take(max(1, row.output_tokens))
    yield Request(
      request_id=request_id, prompt_ids=row.prompt_ids(), max_new_tokens=len(output_ids),
      arrival_s=row.timestamp_ms / 1000.0, forced_output_ids=output_ids,
    )  # fmt: skip


def load(path: pathlib.Path | str, limit: int | None = None) -> Workload:
  """The trace as a workload with its own arrival times."""
  rows = read_rows(path, limit)
  return Workload(
    name="mooncake",
    requests=tuple(requests(rows)),
    notes={"requests_without_output_given_one_token": count_without_output(rows)},
  )


def count_without_output(rows: Iterable[MooncakeRow]) -> int:
  return sum(1 for row in rows if row.output_tokens == 0)
