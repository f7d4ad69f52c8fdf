"""Reading pages of segments by offset, checked, straight into the caller's memory.

What is done for every page is one `os.preadv` of all that follows it in file and memory, and the
two sums of its checksum while it is in the processor's cache; both leave the interpreter's lock to
other readers. Everything else is done for many pages at once.
"""

import logging
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from strata_jax.tiers import page_checksum
from strata_jax.tiers.segment_index import RawFile, Segment

_CALL_PAGES = 1024  # the system takes so many buffers a call
_PART_BYTES = 1 << 20  # less is not worth another thread
_SUMS_BYTES = 16 << 20  # of pages, the sums of small ones take as much
_SMALL_PAGE_BYTES = 16 << 10  # one copy of many is cheaper than sums one by one
log = logging.getLogger(__name__)

# What became of a page:
RIGHT = 0
GONE = 1  # its segment is
UNREADABLE = 2  # the medium refused
SHORT = 3  # the file ends before it does
WRONG = 4  # not what was written


class Reads(NamedTuple):
  """Pages of segments, in the order in which they are read."""

  segments: Sequence[Segment]
  which: np.ndarray  # int64 [pages]: whose page, an index into `segments`
  rows: np.ndarray  # int64 [pages]: in the segment
  places: np.ndarray  # int64 [pages]: where to, rows of the caller's memory
  wanted: np.ndarray  # int64 [pages]: which of the caller's pages

  def take(self, pages: slice | np.ndarray) -> "Reads":
    """Some of the pages."""
    return Reads(self.segments, *(field[pages] for field in self[1:]))

  def keys(self) -> np.ndarray:
    """The pages' keys: uint8 [pages, 32]."""
    return self._gather([segment.keys for segment in self.segments])

  def expected(self) -> np.ndarray:
    """The pages' checksums: uint64 [pages]."""
    return self._gather([segment.expected for segment in self.segments])

  def dead(self) -> np.ndarray:
    """Which pages are dead by now: bool [pages]."""
    return self._gather([segment.dead for segment in self.segments])

  def _gather(self, values: list[np.ndarray]) -> np.ndarray:
    """What the pages have in their segments' arrays."""
    found = np.empty((len(self.rows), *values[0].shape[1:]), values[0].dtype)
    for i, of_segment in enumerate(values):
      here = self.which == i
      found[here] = of_segment[self.rows[here]]
    return found


def live_pages(segments: Sequence[Segment]) -> Reads:
  """All live pages of some segments, to memory of just that size."""
  rows = [np.flatnonzero(segment.live) for segment in segments]
  counts = [len(part) for part in rows]
  pages = np.arange(sum(counts))
  return Reads(
    segments, np.repeat(np.arange(len(segments)), counts),
    np.concatenate(rows) if rows else pages, pages, pages,
  )  # fmt: skip


def share_out(reads: Reads, page_bytes: int, threads: int) -> list[Reads]:
  """Shares reads out to at most `threads` threads."""
  pages = len(reads.rows)
  share = max(-(-_PART_BYTES // page_bytes), -(-pages // threads))
  return [reads.take(slice(at, at + share)) for at in range(0, pages, share)]


def read(reads: Reads, out: np.ndarray, open_file: Callable[[Segment], RawFile]) -> np.ndarray:
  """Reads pages into `out[places]` and checks them; what became of each: int8 [pages].

  Args:
    reads: what to read.
    out: uint8 [any, page_bytes], contiguous rows.
    open_file: the open file of a segment's pages; FileNotFoundError: the segment is gone.
  """
  became = np.full(len(reads.rows), RIGHT, np.int8)
  files: list[RawFile | None] = []  # not closed before they have been read
  for i, segment in enumerate(reads.segments):
    try:
      files.append(open_file(segment))
    except OSError as error:
      missing = isinstance(error, FileNotFoundError)
      became[reads.which == i] = GONE if missing else UNREADABLE
      files.append(None)
      if not missing:
        log.warning("store: pages of %s cannot be read: %s", segment.name, error)
  there = reads if not became.any() else reads.take(np.flatnonzero(became == RIGHT))
  step = max(1, _SUMS_BYTES // out.shape[1])
  parts = range(0, len(there.rows), step)
  found = [_read_open(there.take(slice(at, at + step)), out, files) for at in parts]
  if found:
    became[became == RIGHT] = np.concatenate(found)
  return became


def _read_open(reads: Reads, out: np.ndarray, files: Sequence[RawFile | None]) -> np.ndarray:
  """As `read`, from files that are open; at least one page."""
  pages, page_bytes = len(reads.rows), out.shape[1]
  became = np.full(pages, RIGHT, np.int8)
  sums = page_checksum.empty_sums(pages, page_bytes)
  group = max(1, min(page_checksum.CACHE_BYTES // page_bytes, _CALL_PAGES))
  which, rows, places = reads.which.tolist(), reads.rows.tolist(), reads.places.tolist()
  # Pages that go on where the page before ends, in file and in memory.
  follows = (np.diff(reads.rows, prepend=-2) == 1) & (np.diff(reads.which, prepend=-1) == 0)
  jumps = np.cumsum(np.diff(reads.places, prepend=0) != 1).tolist()
  follows[::group] = False
  starts = np.flatnonzero(~follows).tolist()
  begin = 0  # of the pages whose sums are to be made next
  for start, end in zip(starts, [*starts[1:], pages], strict=True):
    place, count = places[start], end - start
    if jumps[start] == jumps[end - 1]:
      buffers = [out[place : place + count]]
    else:
      buffers = [out[place] for place in places[start:end]]
    file = files[which[start]]
    assert file is not None
    try:
      whole = os.preadv(file.fd, buffers, rows[start] * page_bytes) // page_bytes
      if whole < count:
        became[start + whole : end] = SHORT
    except OSError as error:
      became[start:end] = UNREADABLE
      log.warning("store: pages of %s cannot be read: %s", reads.segments[which[start]].name, error)
    if end - begin < group and end < pages:
      continue
    place = places[begin]
    if jumps[begin] == jumps[end - 1]:
      page_checksum.add_up(out[place : place + end - begin], sums[begin:end])
    elif page_bytes < _SMALL_PAGE_BYTES:
      page_checksum.add_up(out[reads.places[begin:end]], sums[begin:end])
    else:
      for i in range(begin, end):
        page_checksum.add_up(out[places[i] : places[i] + 1], sums[i : i + 1])
    begin = end
  wrong = page_checksum.finish(sums) != reads.expected()
  became[wrong & (became == RIGHT)] = WRONG
  return became
