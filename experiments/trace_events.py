"""Events on lanes: interval arithmetic, and Chrome's trace format.

Times are microseconds. An interval is (start, end); a list of them is a union when it is sorted and
nothing in it overlaps.
"""

import gzip
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Interval = tuple[float, float]

# Lanes, in the order in which they are shown.
LAUNCH, WAIT, PLAN, LOOP = "host launch", "host wait", "host plan", "host loop"
LOADS, BACKUPS, SMALL = "loads", "backups", "small copies"
GEMM, ATTENTION, OTHER, DECODE = "gemm", "attention", "other compute", "decode"
HOST_LANES = (LAUNCH, WAIT, PLAN, LOOP)
COMPUTE_LANES = (GEMM, ATTENTION, OTHER, DECODE)
DEVICE_LANES = (LOADS, BACKUPS, *COMPUTE_LANES, SMALL)


class Event(NamedTuple):
  """Something that took time."""

  lane: str
  name: str
  start_us: float
  end_us: float
  args: Mapping[str, Any]  # what a viewer shows beside it


def union(intervals: Iterable[Interval], gap_us: float = 0.0) -> list[Interval]:
  """Sorted intervals that cover the same; those at most `gap_us` apart become one."""
  merged: list[Interval] = []
  for start, end in sorted(intervals):
    if end < start:
      continue
    if merged and start <= merged[-1][1] + gap_us:
      merged[-1] = (merged[-1][0], max(merged[-1][1], end))
    else:
      merged.append((start, end))
  return merged


def total_us(merged: Sequence[Interval]) -> float:
  """How long a union is."""
  return sum(end - start for start, end in merged)


def both(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
  """The times that are in both unions, a union."""
  found: list[Interval] = []
  i = j = 0
  while i < len(first) and j < len(second):
    start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
    if start < end:
      found.append((start, end))
    if first[i][1] < second[j][1]:
      i += 1
    else:
      j += 1
  return found


def rest_of(window: Interval, merged: Sequence[Interval]) -> list[Interval]:
  """The times of a window that are in no interval of a union, a union."""
  found: list[Interval] = []
  at = window[0]
  for start, end in both([window], merged):
    if start > at:
      found.append((at, start))
    at = max(at, end)
  if at < window[1]:
    found.append((at, window[1]))
  return found


def on_lanes(events: Iterable[Event], lanes: Iterable[str]) -> list[Interval]:
  """When anything is on these lanes, a union."""
  wanted = frozenset(lanes)
  return union((event.start_us, event.end_us) for event in events if event.lane in wanted)


def write_chrome_trace(
  path: pathlib.Path, events: Sequence[Event], marks: Sequence[Event], title: str
) -> None:
  """Writes gzipped JSON that chrome://tracing and ui.perfetto.dev open.

  Args:
    path: the file, named `.json.gz`.
    events: of the lanes above.
    marks: scenarios and steps, shown above all else, a row for each of their lanes.
    title: of the trace.
  """
  rows: list[dict[str, Any]] = []
  zero_us = min((event.start_us for event in (*events, *marks)), default=0.0)
  mark_lanes = tuple(dict.fromkeys(mark.lane for mark in marks))
  groups = ((1, "what runs", mark_lanes), (2, "host", HOST_LANES), (3, "device", DEVICE_LANES))
  tid = 0
  for pid, process, lanes in groups:
    rows.append(_metadata("process_name", pid, 0, {"name": process}))
    rows.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
    for lane in lanes:
      own = [event for event in (*marks, *events) if event.lane == lane]
      for number, row in enumerate(_rows_without_crossing(own)):
        tid += 1
        name = lane if number == 0 else f"{lane} ({number + 1})"
        rows.append(_metadata("thread_name", pid, tid, {"name": name}))
        rows.append(_metadata("thread_sort_index", pid, tid, {"sort_index": tid}))
        rows.extend(
          {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "name": event.name,
            "cat": event.lane,
            "ts": round(event.start_us - zero_us, 3),
            "dur": round(max(event.end_us - event.start_us, 0.0), 3),
            "args": dict(event.args),
          }
          for event in row
        )
  value = {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"title": title}}
  text = json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)
  path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
  return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _rows_without_crossing(events: Sequence[Event]) -> list[list[Event]]:
  """Events in rows: in one row, two lie apart or one inside the other, as viewers need it."""
  rows: list[tuple[list[Event], list[float]]] = []  # events, and the ends of those still open
  for event in sorted(events, key=lambda event: (event.start_us, -event.end_us)):
    own = next((row for row in rows if _fits(event, row[1])), None)
    if own is None:
      own = ([], [])
      rows.append(own)
    own[0].append(event)
    own[1].append(event.end_us)
  return [row for row, _ in rows]


def _fits(event: Event, open_ends_us: list[float]) -> bool:
  """Whether an event crosses none of a row; those that are over by then are taken off."""
  while open_ends_us and open_ends_us[-1] <= event.start_us:
    open_ends_us.pop()
  return not open_ends_us or event.end_us <= open_ends_us[-1]
