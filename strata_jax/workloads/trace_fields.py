"""Checks shared by the trace loaders: every error names the file, the line and the field."""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any


class TraceError(ValueError):
  """A trace file that does not follow its format."""

  def __init__(
    self, path: pathlib.Path, where: int | str, field: str, expected: str, got: object
  ) -> None:
    place = f"line {where}" if isinstance(where, int) else where
    shown = repr(got)
    if len(shown) > 80:
      shown = shown[:77] + "..."
    super().__init__(f"{path}, {place}, {field}: expected {expected}, got {shown}")


MISSING = "nothing"


def parse_object(data: bytes, path: pathlib.Path, first_line: int = 1) -> dict[str, Any]:
  """The JSON object that `data` holds: UTF-8, every field once, no absurd nesting."""

  def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, value in pairs:
      if field in found:
        raise TraceError(path, first_line, field, "the field once", "it again")
      found[field] = value
    return found

  try:
    row = json.loads(data.decode("utf-8").rstrip(), object_pairs_hook=once)
  except TraceError:
    raise
  except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, thousands of brackets
    line = first_line + getattr(error, "lineno", 1) - 1
    raise TraceError(path, line, "row", "a JSON object in UTF-8", data.strip()) from error
  if not isinstance(row, dict):
    raise TraceError(path, first_line, "row", "a JSON object", row)
  return row


def take_int(
  row: Mapping[str, Any], field: str, path: pathlib.Path, where: int | str, *, minimum: int = 0
) -> int:
  """`row[field]`, which must be an int >= minimum (no bool, no string, no float)."""
  value = row.get(field, MISSING)
  if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
    raise TraceError(path, where, field, f"an integer >= {minimum}", value)
  return value


def take_seconds(row: Mapping[str, Any], field: str, path: pathlib.Path, where: int | str) -> float:
  """`row[field]`, which must be a finite number >= 0."""
  value = row.get(field, MISSING)
  if (
    isinstance(value, bool)
    or not isinstance(value, int | float)
    or not math.isfinite(value)
    or value < 0
  ):
    raise TraceError(path, where, field, "a finite number >= 0", value)
  return float(value)


def take_ids(
  row: Mapping[str, Any],
  field: str,
  path: pathlib.Path,
  where: int | str,
  *,
  count: int,
  rule: str,
  maximum: int,
) -> list[int]:
  """`row[field]`, which must be a list of `count` ints in [0, maximum]."""
  value = row.get(field, MISSING)
  if not isinstance(value, list):
    raise TraceError(path, where, field, "a list of block ids", value)
  if len(value) != count:
    raise TraceError(path, where, field, f"{count} block ids ({rule})", f"{len(value)} ids")
  for block in value:
    if type(block) is not int or not 0 <= block <= maximum:
      raise TraceError(path, where, field, f"block ids in [0, {maximum}]", block)
  return value
