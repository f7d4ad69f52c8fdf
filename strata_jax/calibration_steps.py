"""Rows of measured steps as arrays, for fits: what ran in a step and what ran beside it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FIELDS = (
  "started_s", "prefill_end_s", "ended_s", "prefill_requests", "prefill_chunks", "decode_requests",
  "decode_steps", "decode_context_tokens", "load_tokens", "load_end_s", "backup_tokens", "parked",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
  """Computing steps in the order of their launch; all float64 [steps] but `chunks`."""

  started_s: np.ndarray
  prefill_s: np.ndarray  # wall time of the prefill part
  decode_s: np.ndarray  # wall time of the decode part; in a joint step of what follows the pass
  chunks: tuple[tuple[tuple[int, int], ...], ...]  # of each step: (new tokens, tokens before)
  decode_requests: np.ndarray
  decode_steps: np.ndarray
  context_tokens: np.ndarray  # that decode attends to, summed over its steps
  read_tokens: np.ndarray  # those whose KV it reads: fewer where rows read what they share once
  load_tokens: np.ndarray  # launched with the step
  joint: np.ndarray  # bool: prefill_s is that of one pass with the first decode step
  parked: np.ndarray  # requests whose loads are launched without their compute
  load_end_s: np.ndarray  # of these loads; 0 without
  busy_s: np.ndarray  # how long the loads of launches before the step still run beside it
  backup_tokens: np.ndarray  # launched with the step
  disturbed: np.ndarray  # bool: backups were launched between the step before and this one
  gap_s: np.ndarray  # host time before it; NaN where the host did not follow at once
  loads: "Loads"

  def take(self, mask: np.ndarray) -> "Steps":
    """The steps that `mask` (bool [steps]) holds for; with the loads of all."""
    chosen = {
      field.name: getattr(self, field.name)[mask]
      for field in dataclasses.fields(self)
      if field.name not in ("chunks", "loads")
    }
    chunks = tuple(one for one, taken in zip(self.chunks, mask, strict=True) if taken)
    return Steps(chunks=chunks, loads=self.loads, **chosen)

  def thinned(self, most: int) -> "Steps":
    """At most so many of them, evenly chosen."""
    count = len(self.started_s)
    if count <= most:
      return self
    mask = np.zeros(count, bool)
    mask[np.linspace(0, count - 1, most).astype(np.int64)] = True
    return self.take(mask)

  @property
  def has_prefill(self) -> np.ndarray:
    return np.array([len(one) > 0 for one in self.chunks], bool)

  @property
  def has_decode(self) -> np.ndarray:
    return self.decode_requests > 0

  @property
  def first_read_tokens(self) -> np.ndarray:
    """Tokens whose KV the first decode step reads: each one reads a token a request more."""
    steps = np.maximum(self.decode_steps, 1)
    return self.read_tokens / steps - self.decode_requests * (steps - 1) / 2

  @property
  def has_loads(self) -> np.ndarray:
    """Steps beside which loads ran, their own or earlier ones."""
    return (self.load_tokens > 0) | (self.busy_s > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loads:
  """Launches with loads, in their order; all float64 [loads]."""

  started_s: np.ndarray
  after_s: np.ndarray  # when the loads before it had come
  seconds: np.ndarray  # from the later of both to its end
  tokens: np.ndarray
  step: np.ndarray  # int: which of the computing steps it was launched with; -1: none


def read(rows: Sequence[Mapping[str, Any]], source: str) -> Steps:
  """Rows of `metrics.StepRow`, as a run wrote them.

  `host_gap_s`, where rows have it, is taken as the gap before a step. Otherwise it is the time from
  the end of a step to the start of the next one that decodes: then nothing had to be waited for.
  Without `decode_read_tokens` decode steps have read all they attended to, without `joint` no
  prefill was in one pass with them.

  Args:
    rows: as they stand in the file.
    source: names the file in errors.

  Raises:
    ValueError: a row without one of FIELDS (a run of an older version), or no row at all.
  """
  if not rows:
    raise ValueError(f"{source}: expected rows of steps, got none")
  for index, row in enumerate(rows):
    missing = [field for field in FIELDS if field not in row]
    if missing:
      raise ValueError(f"{source}, row {index}: expected the field {missing[0]!r}, got none")
  columns: dict[str, list[Any]] = {name: [] for name in (
    "started_s", "prefill_s", "decode_s", "chunks", "decode_requests", "decode_steps",
    "context_tokens", "read_tokens", "load_tokens", "joint", "parked", "load_end_s", "busy_s",
    "backup_tokens", "disturbed", "gap_s",
  )}  # fmt: skip
  loads: list[tuple[float, float, float, float, int]] = []
  loads_end_s, last_end_s, disturbed = 0.0, None, False
  for row in sorted(rows, key=lambda row: (row["started_s"], row["step_id"])):
    started_s, computes = row["started_s"], row["prefill_requests"] or row["decode_requests"]
    end_s = row["load_end_s"] if row["load_tokens"] else None
    if end_s is not None:
      begin_s = max(started_s, loads_end_s)
      step = len(columns["started_s"]) if computes else -1
      loads.append((started_s, loads_end_s, end_s - begin_s, row["load_tokens"], step))
    if computes:
      steps, requests = row["decode_steps"], row["decode_requests"]
      context_tokens = steps * row["decode_context_tokens"] + requests * steps * (steps + 1) / 2
      values = {
        "started_s": started_s, "prefill_s": row["prefill_end_s"] - started_s,
        "decode_s": row["ended_s"] - row["prefill_end_s"],
        "chunks": tuple((int(new), int(before)) for new, before in row["prefill_chunks"]),
        "decode_requests": requests, "decode_steps": steps,
        "context_tokens": context_tokens,
        "read_tokens": row.get("decode_read_tokens") or context_tokens,
        "load_tokens": 0 if end_s is None else row["load_tokens"],
        "joint": row.get("joint", False), "parked": row["parked"],
        "load_end_s": end_s or 0.0, "busy_s": max(0.0, loads_end_s - started_s),
        "backup_tokens": row["backup_tokens"], "disturbed": disturbed,
        "gap_s": _gap_s(row, last_end_s),
      }  # fmt: skip
      for name, value in values.items():
        columns[name].append(value)
      last_end_s, disturbed = row["ended_s"], False
    elif row["backup_tokens"]:
      disturbed = True
    loads_end_s = max(loads_end_s, end_s or 0.0)
  chunks = tuple(columns.pop("chunks"))
  arrays = {
    name: np.array(values, bool if name in ("disturbed", "joint") else np.float64)
    for name, values in columns.items()
  }
  table = np.array(loads, np.float64).reshape(-1, 5).T
  return Steps(
    chunks=chunks,
    loads=Loads(
      started_s=table[0], after_s=table[1], seconds=table[2], tokens=table[3],
      step=table[4].astype(np.int64),
    ),
    **arrays,
  )  # fmt: skip


def _gap_s(row: Mapping[str, Any], last_end_s: float | None) -> float:
  if "host_gap_s" in row:
    return float("nan") if row["host_gap_s"] is None else row["host_gap_s"]
  if last_end_s is None or not row["decode_requests"]:
    return float("nan")
  return row["started_s"] - last_end_s


def join(parts: Sequence[Steps]) -> Steps:
  """Steps of several runs of one system."""
  loads: dict[str, np.ndarray] = {}
  offsets = np.cumsum([0, *(len(part.started_s) for part in parts)])
  for field in dataclasses.fields(Loads):
    loads[field.name] = np.concatenate([getattr(part.loads, field.name) for part in parts])
  loads["step"] = np.concatenate(
    [
      np.where(part.loads.step < 0, -1, part.loads.step + offset)
      for part, offset in zip(parts, offsets, strict=False)
    ]
  )
  columns = {
    field.name: np.concatenate([getattr(part, field.name) for part in parts])
    for field in dataclasses.fields(Steps)
    if field.name not in ("chunks", "loads")
  }
  chunks = tuple(one for part in parts for one in part.chunks)
  return Steps(chunks=chunks, loads=Loads(**loads), **columns)
