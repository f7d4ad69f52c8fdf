"""The Azure LLM inference traces of 2023: arrival times and lengths, no prefixes.

CSV with the header `TIMESTAMP,ContextTokens,GeneratedTokens`; time stamps have seven fractional
digits (Patel et al., ISCA 2024). Prompts get ids of their own: the trace drives load, not reuse.
"""

import csv
import dataclasses
import datetime
import pathlib
import re
from collections.abc import Iterator, Sequence

from strata_jax.workloads.request import Request
from strata_jax.workloads.trace_fields import TraceError
from strata_jax.workloads.workload import TokenIds, Workload

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_STAMP = re.compile(r"(\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2})(?:\.(\d{1,9}))?", re.ASCII)
_COUNT = re.compile(r"\d+", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AzureRow:
  """One request of the trace."""

  at_ns: int  # from the first row of the file
  input_tokens: int
  output_tokens: int


def read_rows(path: pathlib.Path | str, limit: int | None = None) -> list[AzureRow]:
  """The first `limit` rows. Raises TraceError, naming line and field, for a row out of format.

  Rows must be sorted by time; inputs are at least 1 token, outputs at least 0.
  """
  path = pathlib.Path(path)
  rows: list[AzureRow] = []
  first_ns = last_ns = 0
  with path.open(encoding="utf-8-sig", newline="") as file:
    reader = csv.reader(file)
    header = tuple(next(reader, ()))
    if header != HEADER:
      raise TraceError(path, 1, "header", ",".join(HEADER), ",".join(header))
    for values in reader:
      if limit is not None and len(rows) >= limit:
        break
      line = reader.line_num
      if len(values) != len(HEADER):
        raise TraceError(path, line, "row", f"{len(HEADER)} fields", values)
      at_ns = _nanoseconds(values[0], path, line)
      if not rows:
        first_ns = last_ns = at_ns
      if at_ns < last_ns:
        raise TraceError(path, line, "TIMESTAMP", "no less than the row before", values[0])
      last_ns = at_ns
      rows.append(
        AzureRow(
          at_ns=at_ns - first_ns,
          input_tokens=_count(values[1], "ContextTokens", 1, path, line),
          output_tokens=_count(values[2], "GeneratedTokens", 0, path, line),
        )
      )
  if not rows:
    raise TraceError(path, 2, "row", "at least one row", "an empty file")
  return rows


def requests(rows: Sequence[AzureRow]) -> Iterator[Request]:
  """The rows as requests. A row without output gets one token: the one that its prefill gives."""
  fresh = TokenIds()
  for request_id, row in enumerate(rows):
    output_tokens = max(1, row.output_tokens)
    yield Request(
      request_id=request_id, prompt_ids=fresh.take(row.input_tokens),
      max_new_tokens=output_tokens, arrival_s=row.at_ns / 1e9,
      forced_output_ids=fresh.take(output_tokens),
    )  # fmt: skip


def load(path: pathlib.Path | str, limit: int | None = None) -> Workload:
  """The trace as a workload with its own arrival times."""
  rows = read_rows(path, limit)
  empty = sum(1 for row in rows if row.output_tokens == 0)
  return Workload(
    name="azure2023",
    requests=tuple(requests(rows)),
    notes={"requests_without_output_given_one_token": empty},
  )


def _nanoseconds(text: str, path: pathlib.Path, line: int) -> int:
  match = _STAMP.fullmatch(text)
  expected = "YYYY-MM-DD hh:mm:ss with up to nine fractional digits"
  if match is None:
    raise TraceError(path, line, "TIMESTAMP", expected, text)
  try:
    stamp = datetime.datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S")
  except ValueError as error:
    raise TraceError(path, line, "TIMESTAMP", expected, text) from error
  seconds = round((stamp - datetime.datetime(1970, 1, 1)).total_seconds())
  return seconds * 10**9 + int((match[2] or "0").ljust(9, "0"))


def _count(text: str, field: str, minimum: int, path: pathlib.Path, line: int) -> int:
  if not _COUNT.fullmatch(text) or int(text) < minimum:
    raise TraceError(path, line, field, f"an integer >= {minimum}", text)
  return int(text)
