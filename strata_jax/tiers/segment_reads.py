"""Reading pages of segments by offset, checked, straight into the caller's memory.

What is done for every page is one `os.preadv` of all that follows it in file and memory, and the
two sums of its checksum while it is in the processor's cache; both leave the interpreter's lock to
other readers. Everything else is done for many pages at once.
"""

import collections
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from strata_jax.tiers import page_checksum
from strata_jax.tiers.segment_index import RawFile, Segment

_CALL_PAGES = 1024  # the system takes so many buffers a call
_UNIT_BYTES = 2 << 20  # that a thread takes at a time
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


class Job:
  """Reads that any number of threads carry out together, a unit of pages at a time each.

  Who is slower takes fewer, so nobody waits for long at the end.
  """

  def __init__(
    self, reads: Reads, out: np.ndarray, open_file: Callable[[Segment], RawFile]
  ) -> None:
    """Opens the files.

    Args:
      reads: what to read, into `out[places]`.
      out: uint8 [any, page_bytes], contiguous rows.
      open_file: the open file of a segment's pages; FileNotFoundError: the segment is gone.
    """
    self.reads = reads
    self.became = np.full(len(reads.rows), UNREADABLE, np.int8)  # of each page, after the work
    self._out = out
    self._files: dict[int, RawFile] = {}  # not closed before they have been read
    for i, segment in enumerate(reads.segments):
      try:
        self._files[i] = open_file(segment)
      except FileNotFoundError:
        self.became[reads.which == i] = GONE
      except OSError as error:
        log.warning("store: pages of %s cannot be read: %s", segment.name, error)
    self._there = np.arange(len(reads.rows))  # whose file is open
    if len(self._files) < len(reads.segments):
      self._there = np.flatnonzero(np.isin(reads.which, list(self._files)))
      reads = reads.take(self._there)
    pages, page_bytes = len(reads.rows), out.shape[1]
    self._expected = reads.expected() if pages else np.empty(0, np.uint64)
    self._which, self._rows = reads.which.tolist(), reads.rows.tolist()
    self._places = reads.places.tolist()
    # Pages go on where the one before ends: in the file, unless a cache's worth ends; in memory.
    self._group = max(1, min(page_checksum.CACHE_BYTES // page_bytes, _CALL_PAGES))
    follows = (np.diff(reads.rows, prepend=-2) == 1) & (np.diff(reads.which, prepend=-1) == 0)
    follows[:: self._group] = False
    self._jumps = np.cumsum(np.diff(reads.places, prepend=0) != 1).tolist()
    starts = np.flatnonzero(~follows)
    unit = self._group * max(1, _UNIT_BYTES // (self._group * page_bytes))
    firsts = np.searchsorted(starts, np.arange(0, pages + unit, unit)).tolist()
    bounds = [*starts.tolist(), pages]
    self._units = collections.deque(
      bounds[first : last + 1] for first, last in itertools.pairwise(firsts)
    )

  @property
  def units(self) -> int:
    """So many threads have something to do."""
    return len(self._units)

  def work(self) -> None:
    """Reads and checks pages until nothing is left to be begun. Any thread."""
    while True:
      try:
        bounds = self._units.popleft()
      except IndexError:
        return
      self._read(bounds)

  def _read(self, bounds: list[int]) -> None:
    """Reads the pages between the bounds, each stretch with one call."""
    out, jumps, places = self._out, self._jumps, self._places
    page_bytes = out.shape[1]
    base, pages = bounds[0], bounds[-1]
    became = np.full(pages - base, RIGHT, np.int8)
    sums = page_checksum.empty_sums(pages - base, page_bytes)
    begin = base  # of the pages whose sums are to be made next
    for start, end in itertools.pairwise(bounds):
      if jumps[start] == jumps[end - 1]:
        buffers = [out[places[start] : places[start] + end - start]]
      else:
        buffers = [out[place] for place in places[start:end]]
      try:
        offset = self._rows[start] * page_bytes
        whole = os.preadv(self._files[self._which[start]].fd, buffers, offset) // page_bytes
        if whole < end - start:
          became[start + whole - base : end - base] = SHORT
      except OSError as error:
        became[start - base : end - base] = UNREADABLE
        log.warning("store: pages cannot be read: %s", error)
      if end - begin >= self._group or end == pages:
        self._add_up(begin, end, sums[begin - base : end - base])
        begin = end
    wrong = page_checksum.finish(sums) != self._expected[base:pages]
    became[wrong & (became == RIGHT)] = WRONG
    self.became[self._there[base:pages]] = became

  def _add_up(self, begin: int, end: int, sums: np.ndarray) -> None:
    """Sums of pages that have just been read."""
    out, places = self._out, self._places[begin:end]
    if self._jumps[begin] == self._jumps[end - 1]:
      page_checksum.add_up(out[places[0] : places[0] + end - begin], sums)
    elif out.shape[1] < _SMALL_PAGE_BYTES:
      page_checksum.add_up(out[places], sums)
    else:
      for i, place in enumerate(places):
        page_checksum.add_up(out[place : place + 1], sums[i : i + 1])
