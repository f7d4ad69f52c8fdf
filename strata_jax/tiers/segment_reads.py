"""Reading pages of segments by offset, checked, straight into the caller's memory."""

import os
from typing import NamedTuple

import numpy as np

from strata_jax.tiers import page_checksum
from strata_jax.tiers.segment_index import RawFile, Segment

_CALL_PAGES = 1024  # the system takes so many buffers a call
_PART_BYTES = 1 << 20  # less is not worth another thread


class Run(NamedTuple):
  """Pages that follow each other in a segment."""

  segment: Segment
  row: int  # of the first
  wanted: list[int]  # which of the caller's pages they are


def live_runs(segment: Segment) -> list[Run]:
  """All live pages of a segment."""
  rows = np.flatnonzero(segment.live)
  breaks = np.flatnonzero(np.diff(rows) != 1) + 1
  return [Run(segment, int(part[0]), part.tolist()) for part in np.split(rows, breaks) if len(part)]


def split(runs: list[Run], page_bytes: int, share_bytes: int) -> list[list[Run]]:
  """Cuts reads into parts of at most `share_bytes`, or one page."""
  share = max(1, share_bytes // page_bytes)
  parts: list[list[Run]] = []
  room = 0
  for run in runs:
    row, wanted = run.row, run.wanted
    while wanted:
      if not room:
        parts.append([])
        room = share
      parts[-1].append(Run(run.segment, row, wanted[:room]))
      took = min(room, len(wanted))
      row, wanted, room = row + took, wanted[took:], room - took
  return parts


def share_out(runs: list[Run], page_bytes: int, threads: int) -> list[list[Run]]:
  """Shares reads out to at most `threads` threads, by bytes."""
  total_bytes = sum(len(run.wanted) for run in runs) * page_bytes
  share_bytes = max(_PART_BYTES, -(-total_bytes // threads))
  return split(runs, page_bytes, share_bytes)


def read_run(run: Run, file: RawFile, out: np.ndarray, rows: np.ndarray) -> int:
  """Reads the run's pages into `out[rows[i]]` for i of `run.wanted`; how many came whole.

  Raises:
    OSError: the medium refused.
  """
  page_bytes = out.shape[1]
  whole = 0
  for at in range(0, len(run.wanted), _CALL_PAGES):
    places = [int(rows[i]) for i in run.wanted[at : at + _CALL_PAGES]]
    first, count = places[0], len(places)
    if places == list(range(first, first + count)):
      buffers = [out[first : first + count]]
    else:
      buffers = [out[place] for place in places]
    got = os.preadv(file.fd, buffers, (run.row + at) * page_bytes) // page_bytes
    whole += got
    if got < count:
      break
  return whole


def check(out: np.ndarray, places: np.ndarray, expected: np.ndarray) -> np.ndarray:
  """Which of the pages `out[places]` have the checksums expected: bool [places]."""
  if not len(places):
    return np.zeros(0, bool)
  if places[-1] - places[0] == len(places) - 1 and (np.diff(places) == 1).all():
    return page_checksum.checksums(out[places[0] : places[-1] + 1]) == expected
  if out.shape[1] < page_checksum.BATCH_BYTES >> 5:  # many small pages: one copy is cheaper
    return page_checksum.checksums(out[places]) == expected
  found = [page_checksum.checksums(out[place : place + 1]) for place in places]
  return np.concatenate(found) == expected
