"""Decisions on file: each view with its plan as one JSON line, read back exactly.

  with Recorder("run.jsonl.gz", policy="strata", config=config) as recorder:
    serve(..., recorder=recorder)
  record = read_record("run.jsonl.gz")
  for view, plan in record.decisions(): ...

The first line is a header: format, policy, scheduler config. Tuples are written as arrays in the
order of their fields; fields that have their default are left out; `inf` stands for infinity. A
file whose name ends in `.gz` is compressed.
"""

import dataclasses
import gzip
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, TextIO, cast

from strata_jax.scheduler import views
from strata_jax.scheduler.config import SchedulerConfig

FORMAT = "strata_jax_decisions"
FORMAT_VERSION = 1

Decision = tuple[views.SchedulerView, views.StepPlan]


class RecordError(ValueError):
  """A record that cannot be read; names file and line."""


class Recorder:
  """Writes decisions; called by the serving loop with each view and plan. Use as a context."""

  def __init__(
    self, path: str | pathlib.Path, *, policy: str, config: SchedulerConfig, **about: Any
  ) -> None:
    """Opens the file and writes the header. `about`: anything else worth keeping, as JSON."""
    self.path = pathlib.Path(path)
    self.path.parent.mkdir(parents=True, exist_ok=True)
    self._file: TextIO = _open(self.path, "wt")
    header = {"format": FORMAT, "version": FORMAT_VERSION, "policy": policy}
    self._write(header | {"scheduler": config_to_json(config)} | about)

  def __call__(self, view: views.SchedulerView, plan: views.StepPlan) -> None:
    self._write({"view": view_to_json(view), "plan": plan_to_json(plan)})

  def __enter__(self) -> "Recorder":
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def close(self) -> None:
    self._file.close()

  def _write(self, value: Mapping[str, Any]) -> None:
    self._file.write(json.dumps(value, separators=(",", ":"), allow_nan=False, default=_item))
    self._file.write("\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """A record on file; `decisions` reads it anew each time."""

  path: pathlib.Path
  policy: str
  config: SchedulerConfig
  about: Mapping[str, Any]

  def decisions(self) -> Iterator[Decision]:
    """Views and plans in the order in which they were made. Raises RecordError."""
    for number, line in _lines(self.path):
      if number == 1:
        continue
      try:
        value = json.loads(line)
        yield view_from_json(value["view"]), plan_from_json(value["plan"])
      except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RecordError(f"{self.path}:{number}: expected a decision, got {error!r}") from error


def read_record(path: str | pathlib.Path) -> Record:
  """Opens a record and reads its header.

  Raises:
    OSError: no such file.
    RecordError: not a record, or of another version.
  """
  path = pathlib.Path(path)
  first = next(_lines(path), None)
  try:
    header = json.loads(first[1]) if first else {}
  except ValueError:
    header = {}
  if not isinstance(header, dict) or header.get("format") != FORMAT:
    raise RecordError(f"{path}:1: expected the header of a record ({FORMAT})")
  if header.get("version") != FORMAT_VERSION:
    raise RecordError(f"{path}:1: expected version {FORMAT_VERSION}, got {header.get('version')}")
  try:
    config = config_from_json(header["scheduler"])
  except (KeyError, TypeError, ValueError) as error:
    raise RecordError(f"{path}:1: expected a scheduler config, got {error}") from error
  known = ("format", "version", "policy", "scheduler")
  about = {key: value for key, value in header.items() if key not in known}
  return Record(path=path, policy=header.get("policy", ""), config=config, about=about)


def config_to_json(config: SchedulerConfig) -> dict[str, Any]:
  """All fields; infinity as the text `inf`."""
  return {
    field: "inf" if value == math.inf else value
    for field, value in dataclasses.asdict(config).items()
  }


def config_from_json(value: Mapping[str, Any]) -> SchedulerConfig:
  """The reverse of config_to_json. Raises TypeError on unknown fields, ValueError on bad ones."""
  fields: dict[str, Any] = {
    field: math.inf if item == "inf" else item for field, item in value.items()
  }
  return SchedulerConfig(**fields)


def view_to_json(view: views.SchedulerView) -> dict[str, Any]:
  """A view as JSON types."""
  value = _shallow(view)
  value["waiting"] = [_request_to_json(request) for request in view.waiting]
  value["running"] = [_request_to_json(request) for request in view.running]
  value["budgets"] = _shallow(view.budgets)
  if "costs" in value:
    value["costs"] = _shallow(view.costs)
  if "in_flight" in value:
    value["in_flight"] = [[node_id, *producer] for node_id, producer in view.in_flight.items()]
  if "loading" in value:
    value["loading"] = [list(item) for item in view.loading.items()]
  return value


def view_from_json(value: Mapping[str, Any]) -> views.SchedulerView:
  """The reverse of view_to_json."""
  fields = dict(value)
  fields["waiting"] = tuple(_waiting_from_json(item) for item in fields.get("waiting", ()))
  fields["running"] = tuple(_running_from_json(item) for item in fields.get("running", ()))
  fields["budgets"] = views.Budgets(**fields["budgets"])
  if "costs" in fields:
    fields["costs"] = views.Costs(**fields["costs"])
  if fields.get("parked") is not None:
    request_ids, load_tokens, compute_tokens = fields["parked"]
    fields["parked"] = views.ParkedView(tuple(request_ids), load_tokens, compute_tokens)
  if "in_flight" in fields:
    fields["in_flight"] = {
      node_id: views.Producer(request_id, tokens)
      for node_id, request_id, tokens in fields["in_flight"]
    }
  if "loading" in fields:
    fields["loading"] = dict(fields["loading"])
  return views.SchedulerView(**fields)


def plan_to_json(plan: views.StepPlan) -> dict[str, Any]:
  """A plan as JSON types."""
  return _shallow(plan)


def plan_from_json(value: Mapping[str, Any]) -> views.StepPlan:
  """The reverse of plan_to_json."""
  fields: dict[str, Any] = {
    name: tuple(item) if isinstance(item, list) else item for name, item in value.items()
  }
  if "prefill" in fields:
    fields["prefill"] = tuple(
      views.Prefill(request_id, tuple(views.Load(*load) for load in loads), start, end)
      for request_id, loads, start, end in fields["prefill"]
    )
  if "deferred" in fields:
    fields["deferred"] = tuple(
      views.Deferred(request_id, reason, tuple(nodes))
      for request_id, reason, nodes in fields["deferred"]
    )
  if "refused" in fields:
    fields["refused"] = tuple(views.Refused(*item) for item in fields["refused"])
  return views.StepPlan(**fields)


def _request_to_json(request: views.RequestView | views.RunningView) -> dict[str, Any]:
  value = _shallow(request)
  if "path" in value:
    value["path"] = [list(span if span[3] else span[:3]) for span in request.path]
  return value


def _path_from_json(fields: dict[str, Any]) -> None:
  if "path" in fields:
    fields["path"] = tuple(views.Span(*span) for span in fields["path"])


def _waiting_from_json(value: Mapping[str, Any]) -> views.RequestView:
  fields = dict(value)
  _path_from_json(fields)
  if fields.get("prefetch") is not None:
    fields["prefetch"] = views.PrefetchView(*fields["prefetch"])
  if "after" in fields:
    fields["after"] = tuple(fields["after"])
  return views.RequestView(**fields)


def _running_from_json(value: Mapping[str, Any]) -> views.RunningView:
  fields = dict(value)
  _path_from_json(fields)
  return views.RunningView(**fields)


def _shallow(value: Any) -> dict[str, Any]:
  """The fields that differ from their default; nested values as they are."""
  if isinstance(value, tuple):
    fields: dict[str, Any] = cast(Any, value)._asdict()
    defaults = cast(Any, value)._field_defaults
    return {
      name: item for name, item in fields.items() if name not in defaults or item != defaults[name]
    }
  found: dict[str, Any] = {}
  for field in dataclasses.fields(value):
    item = getattr(value, field.name)
    if field.default is not dataclasses.MISSING and item == field.default:
      continue
    if field.default_factory is not dataclasses.MISSING and not item:
      continue
    found[field.name] = item
  return found


def _item(value: Any) -> Any:
  """NumPy scalars as numbers."""
  if hasattr(value, "item"):
    return value.item()
  raise TypeError(f"expected plain data in a view or plan, got {type(value).__name__}")


def _open(path: pathlib.Path, mode: str) -> TextIO:
  opened = gzip.open if path.suffix == ".gz" else open
  return cast(TextIO, opened(path, mode, encoding="utf-8"))


def _lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
  with _open(path, "rt") as file:
    try:
      yield from enumerate(file, start=1)
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile) as error:
      raise RecordError(f"{path}: cannot be read: {error}") from error
