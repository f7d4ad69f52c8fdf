"""Reads the files that runs wrote (see `run_folder`); errors name the file and what it lacks."""

import gzip
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Row = dict[str, Any]


def read_json(path: pathlib.Path) -> Row:
  """Raises OSError; ValueError on what is no JSON object."""
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
  except json.JSONDecodeError as error:
    raise ValueError(f"{path}: expected JSON, got {error}") from error
  if not isinstance(found, dict):
    raise ValueError(f"{path}: expected an object, got {type(found).__name__}")
  return found


def read_rows(path: pathlib.Path) -> Iterator[Row]:
  """The objects of a .jsonl or .jsonl.gz. Raises OSError; ValueError on what is no JSON."""
  for index, line in enumerate(_lines(path)):
    try:
      row = json.loads(line)
    except json.JSONDecodeError as error:
      raise ValueError(f"{path}, line {index + 1}: expected JSON, got {error}") from error
    if not isinstance(row, dict):
      raise ValueError(f"{path}, line {index + 1}: expected an object, got {line[:40]!r}")
    yield row


def need(found: Mapping[str, Any], path: pathlib.Path, *fields: str, prefix: str = "") -> Any:
  """A field, of a field, ... Raises ValueError that names the file and the field."""
  value: Any = found
  where = prefix
  for field in fields:
    where = f"{where}.{field}" if where else field
    if not isinstance(value, Mapping) or field not in value:
      raise ValueError(f"{path}: expected the field {where!r}, got none")
    value = value[field]
  return value


def _lines(path: pathlib.Path) -> Iterable[str]:
  opened = gzip.open if path.suffix == ".gz" else open
  with opened(path, "rt", encoding="utf-8") as file:
    yield from file
