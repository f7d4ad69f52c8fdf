"""Reading pages of segments by offset, checked, straight into the caller's memory."""

import os
from typing import NamedTuple

import numpy as np

from strata_jax.tiers import page_checksum
from strata_jax.tiers.segment_index import RawFile, Segment

_CALL_BYTES = 1 << 18  # read by one call and checked while it is in the processor's cache
_CALL_PAGES = 512  # the system takes 1,024 buffers a call
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


def split(runs: list[Run], page_bytes: int, parts: int) -> list[list[Run]]:
  """Shares reads out to at most `parts` threads, by bytes."""
  total = sum(len(run.wanted) for run in runs)
  parts = max(1, min(parts, total * page_bytes // _PART_BYTES))
  share = -(-total // parts)
  result: list[list[Run]] = []
  room = 0
  for run in runs:
    row, wanted = run.row, run.wanted
    while wanted:
      if not room:
        result.append([])
        room = share
      result[-1].append(Run(run.segment, row, wanted[:room]))
      took = min(room, len(wanted))
      row, wanted, room = row + took, wanted[took:], room - took
  return result


def read_run(run: Run, file: RawFile, out: np.ndarray, rows: np.ndarray) -> np.ndarray:
  """Reads the run's pages into `out[rows[i]]` for i of `run.wanted`: bool [pages], which are right.

  Raises:
    OSError: the medium refused.
  """
  page_bytes = out.shape[1]
  step = max(1, min(_CALL_PAGES, _CALL_BYTES // page_bytes))
  right = np.zeros(len(run.wanted), bool)
  for at in range(0, len(right), step):
    part = rows[run.wanted[at : at + step]]
    row = run.row + at
    adjoining = bool((np.diff(part) == 1).all())
    buffers = [out[part[0] : part[-1] + 1]] if adjoining else [out[i] for i in part]
    got = os.preadv(file.fd, buffers, row * page_bytes)
    whole = got // page_bytes
    pages = out[part[0] : part[0] + whole] if adjoining else out[part[:whole]]
    found = page_checksum.checksums(pages)
    right[at : at + whole] = found == run.segment.expected[row : row + whole]
  return right
