"""Pages on a disk, in segments that Orbax commits; the default store.

Pages gather in memory until they fill a segment or have waited `linger_s`. A segment is one raw
file of pages with an index, whole or absent (see `segment_index`); single pages are read by offset,
straight to where the caller wants them. Space comes back by whole segments, the least recently used
first; segments with few live pages are merged in the background.

Several processes may share a folder. Each writes segments of its own and looks for those of others
when the folder's time stamp changes: before it looks a page up and before it commits. What races
cost: two processes that commit the same page within the time of one commit both keep it until a
compaction; two that evict at the same time may evict a segment more than needed; a reader whose
segment another process took away reads a miss, or reads the page from where it was merged to.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from strata_jax import page_keys
from strata_jax.tiers import compaction, page_checksum, page_store, segment_reads
from strata_jax.tiers.segment_folder import SegmentFolder
from strata_jax.tiers.segment_index import (
  RawFile,
  Segment,
  SegmentIndex,
  encode_index,
  folder_bytes,
  load_segment,
  namespace_of,
)
from strata_jax.tiers.segment_save import SegmentSaver
from strata_jax.tiers.segment_staging import Batch, Durable, Staging

_OVERHEAD_BYTES = 8192  # of a segment, beside pages and index
_SHARE_OF_CAPACITY = 8  # a segment is at most this part of the capacity
_READ_THREADS = 4  # by default at most
_LOOKUPS = 256  # keys looked up at a time
_FAULTS = {segment_reads.SHORT: "short", segment_reads.WRONG: "not what was written"}
log = logging.getLogger(__name__)


class OrbaxSegments:
  """A `PageStore` in a folder."""

  def __init__(
    self,
    folder: str,
    *,
    page_bytes: int,
    fingerprint: str,
    capacity_bytes: int | None = None,
    segment_bytes: int = page_store.DEFAULT_SEGMENT_BYTES,
    linger_s: float = 2.0,
    read_threads: int | None = None,
  ):
    """Opens or makes the store and sweeps what dead writers left.

    Raises:
      ValueError: the capacity is too small for these pages, or the folder holds something else.
      OSError: the folder cannot be read.
    """
    self.page_bytes = page_bytes
    self._fingerprint = fingerprint
    self._capacity_bytes = capacity_bytes
    if capacity_bytes is not None:
      segment_bytes = min(segment_bytes, capacity_bytes // _SHARE_OF_CAPACITY)
      least = _SHARE_OF_CAPACITY * page_bytes + 2 * _OVERHEAD_BYTES
      if capacity_bytes < least:
        raise ValueError(f"store: expected a capacity >= {least} bytes, got {capacity_bytes}")
    self._batch_pages = max(1, segment_bytes // page_bytes)
    self.stats = dict.fromkeys(
      (
        "written_pages",
        "failed_writes",
        "evicted_segments",
        "compactions",
        "bad_pages",
        "swept_leftovers",
      ),
      0,
    )
    self._folder = SegmentFolder(folder)
    self._index = SegmentIndex(namespace_of(fingerprint, page_bytes))
    self._lock = threading.RLock()
    if self._folder.writable:
      self.stats["swept_leftovers"] = self._folder.sweep()
    self._refresh(force=True)
    self._savers: queue.SimpleQueue[SegmentSaver] = queue.SimpleQueue()  # not in use
    self._incoming_bytes = 0  # of segments that are being saved
    # Beyond the processors, threads only take turns: with a warm cache reading is computing.
    self._read_threads = read_threads or min(_READ_THREADS, max(2, os.cpu_count() or 1))
    self._readers = ThreadPoolExecutor(self._read_threads, thread_name_prefix="segment-reads")
    self._staging = Staging(
      page_bytes=page_bytes, batch_pages=self._batch_pages, linger_s=linger_s, lock=self._lock,
      is_durable=self._is_durable, commit=self._commit, idle=self._idle,
    )  # fmt: skip

  @property
  def writable(self) -> bool:
    return self._folder.writable

  # Look-up.

  def _refresh(self, *, force: bool = False) -> None:
    """Takes in what other processes committed or took away."""
    with self._lock:
      try:
        names = self._folder.changed(force=force)
      except OSError as error:
        log.warning("store: the folder cannot be read: %s", error)
        return
      if names is None:
        return
      for name in self._index.segments.keys() - names:
        self._index.remove(name)
      for name in sorted(names - self._index.segments.keys()):
        try:
          self._index.add(load_segment(os.path.join(self._folder.segments, name)))
        except FileNotFoundError:
          pass  # taken away meanwhile
        except (OSError, ValueError) as error:
          log.warning("store: segment %s is left out: %s", name, error)
          self.stats["bad_pages"] += 1
          if self._folder.writable:
            self._folder.discard(name)

  def contains(self, keys: Sequence[bytes]) -> np.ndarray:
    with self._lock:
      self._refresh()
      return self._present(keys)

  def longest_prefix(self, keys: Sequence[bytes]) -> int:
    with self._lock:
      self._refresh()
      for start in range(0, len(keys), _LOOKUPS):
        present = self._present(keys[start : start + _LOOKUPS])
        if not present.all():
          return start + page_store.leading(present)
    return len(keys)

  def _present(self, keys: Sequence[bytes]) -> np.ndarray:
    """Which keys are in the index or on their way there: bool [keys]. Under the lock."""
    present = self._index.find_all(keys) >= 0
    for i in np.flatnonzero(~present).tolist() if self._staging.pages else ():
      present[i] = self._staging.find(keys[i]) is not None
    return present

  def list_keys(self) -> list[bytes]:
    """The keys of all durable pages."""
    with self._lock:
      self._refresh()
      return self._index.keys()

  def locate(self, key: bytes) -> tuple[str, int] | None:
    """The folder of the segment and the row in it that hold a durable page."""
    with self._lock:
      self._refresh()
      found = self._index.find(key)
      return None if found is None else (found[0].path, found[1])

  def _is_durable(self, key: bytes) -> bool:
    found = self._index.find(key)
    if found is not None:
      found[0].touch()
    return found is not None

  # Reading.

  def read(
    self, keys: Sequence[bytes], out: np.ndarray, rows: np.ndarray | None = None
  ) -> Future[np.ndarray]:
    page_store.check_pages(out, self.page_bytes)
    rows = page_store.rows_of(rows, len(keys))
    right = np.zeros(len(keys), bool)
    reads = self._plan(np.arange(len(keys)), keys, out, rows, right)
    job = segment_reads.Job(reads, out, self._open)
    left = max(1, min(self._read_threads, job.units))
    future: Future[np.ndarray] = Future()

    def work() -> None:
      nonlocal left
      try:
        job.work()
      except Exception as error:  # a fault here must not leave anybody waiting
        log.exception("store: a read failed: %s", error)
      with self._lock:
        left -= 1
        if left:
          return
      try:
        vanished = self._settle(job, right)
        if len(vanished):  # merged elsewhere, perhaps
          self._refresh(force=True)
          self._read(self._plan(vanished, keys, out, rows, right), out, right)
      except Exception as error:
        log.exception("store: a read failed: %s", error)
      future.set_result(right)

    if not len(reads.rows):
      future.set_result(right)
      return future
    for _ in range(left):
      self._readers.submit(work)
    return future

  def _plan(
    self,
    wanted: np.ndarray,
    keys: Sequence[bytes],
    out: np.ndarray,
    rows: np.ndarray,
    right: np.ndarray,
  ) -> segment_reads.Reads:
    """Copies what is still in memory of the pages `wanted`; where the rest lies."""
    with self._lock:
      self._refresh()
      places = self._index.find_all([keys[i] for i in wanted.tolist()])
      for i in wanted[places < 0].tolist() if self._staging.pages else ():
        pending = self._staging.find(keys[i])
        if pending is not None:
          batch, row = pending
          out[rows[i]] = batch.pages[row]
          right[i] = True
      there = places >= 0
      segments, which, found = self._index.places(places[there])
      for segment in segments:
        segment.touch()
    wanted = wanted[there]
    return segment_reads.Reads(segments, which, found, rows[wanted], wanted)

  def _read(self, reads: segment_reads.Reads, out: np.ndarray, right: np.ndarray) -> None:
    """Reads and checks pages in this thread."""
    job = segment_reads.Job(reads, out, self._open)
    job.work()
    self._settle(job, right)

  def _settle(self, job: segment_reads.Job, right: np.ndarray) -> np.ndarray:
    """Notes which pages are right and buries the bad ones; gives those whose segment is gone."""
    reads, became = job.reads, job.became
    right[reads.wanted[became == segment_reads.RIGHT]] = True
    for fault, reason in _FAULTS.items():
      bad = became == fault
      for i in np.unique(reads.which[bad]).tolist():
        self._bury(reads.segments[i], reads.rows[bad & (reads.which == i)].tolist(), reason)
    return reads.wanted[became == segment_reads.GONE]

  def _open(self, segment: Segment) -> RawFile:
    file = segment.file
    if file is not None:
      return file
    with self._lock:
      return segment.open()

  def _bury(self, segment: Segment, rows: Iterable[int], reason: str) -> None:
    with self._lock:
      bad = [row for row in rows if not segment.dead[row]]
      self.stats["bad_pages"] += len(bad)
      for row in bad:
        self._index.bury(segment, row)
    if bad:
      log.warning("store: pages %s of %s are misses: %s", bad, segment.path, reason)

  # Writing.

  def write(
    self, keys: Sequence[bytes], pages: np.ndarray, rows: np.ndarray | None = None
  ) -> Future[int]:
    page_store.check_pages(pages, self.page_bytes)
    rows = page_store.rows_of(rows, len(keys))
    write = Durable()
    if self._folder.writable:
      self._refresh()
      self._staging.add(keys, pages, rows, write)
      write.arrived(0)
    else:
      write.arrived(0, page_store.read_only())
    return write.future

  def _commit(self, batch: Batch) -> None:
    """Makes a segment of a batch. Raises OSError when the medium refuses."""
    self._refresh(force=True)
    with self._lock:
      for key in [key for key in batch.rows if key in self._index]:
        del batch.rows[key]  # another process was faster
      batch.pack()
    if batch.count:
      try:
        spare_bytes = self._batch_pages * self.page_bytes  # for a compaction
        self._save(batch.pages[: batch.count], batch.keys, batch.checksums, spare_bytes=spare_bytes)
      except OSError:
        self.stats["failed_writes"] += 1
        raise
      self.stats["written_pages"] += batch.count
    self._idle()

  def _save(
    self, pages: np.ndarray, keys: np.ndarray, checksums: np.ndarray, *, spare_bytes: int = 0
  ) -> Segment | None:
    """Commits a segment of `pages`, with as many keys and checksums from the start.

    None: it is durable, and another process has merged or evicted it already.
    """
    keys, checksums = keys[: len(pages)].copy(), checksums[: len(pages)].copy()
    size_bytes = pages.nbytes + len(pages) * (page_keys.KEY_BYTES + 8) + _OVERHEAD_BYTES
    self._make_room(size_bytes, spare_bytes)
    named = checksums ^ page_checksum.names(keys)
    index = encode_index(self._index.namespace, self.page_bytes, keys, named)
    with self._lock:
      path = self._folder.new_path()
    try:
      saver = self._savers.get_nowait()
    except queue.Empty:
      saver = SegmentSaver()
    try:
      metadata = {"fingerprint": self._fingerprint, "page_bytes": self.page_bytes}
      saver.save(path, pages, index, metadata)
      self._folder.sync()
    except OSError:
      self._folder.discard_unfinished(path)
      raise
    finally:
      self._savers.put(saver)
      with self._lock:
        self._incoming_bytes -= size_bytes
    now_s = time.time()
    try:
      segment = Segment(
        path=path, namespace=self._index.namespace, page_bytes=self.page_bytes, keys=keys,
        expected=checksums, dead=np.zeros(len(keys), bool), shadowed=np.zeros(len(keys), bool),
        bytes=folder_bytes(path), used_s=now_s, touched_s=now_s,
      )  # fmt: skip
    except FileNotFoundError:
      return None
    with self._lock:  # a look at the folder may have found it already
      if segment.name not in self._index.segments:
        self._index.add(segment)
      return self._index.segments[segment.name]

  def _make_room(self, size_bytes: int, spare_bytes: int) -> None:
    """Takes room for `size_bytes`, with some spare: evicts segments, least recently used first."""
    with self._lock:
      self._incoming_bytes += size_bytes
    while self._capacity_bytes is not None:
      with self._lock:
        taken = self._index.bytes + self._incoming_bytes + spare_bytes
        victim = self._index.oldest()
        if victim is None or taken <= self._capacity_bytes:
          return
        if victim.used_elsewhere():
          continue
        self._index.remove(victim.name)
      self._folder.discard(victim.name)
      self.stats["evicted_segments"] += 1

  def delete(self, keys: Sequence[bytes]) -> int:
    deleted = 0
    with self._lock:
      self._refresh()
      for key in keys:
        if self._staging.forget(key):
          deleted += 1
        found = self._index.find(key)
        if found is not None:
          self._index.bury(*found)
          deleted += 1
    return deleted

  # Upkeep.

  def _idle(self) -> None:
    try:
      if self.writable:
        self.compact(force=False)
    except Exception as error:  # also no memory for it: the thread has pages to write
      log.warning("store: a compaction failed: %s", error)

  def compact(self, *, force: bool = True) -> int:
    """Gives back the space of dead pages and merges small segments; how many segments went."""
    if not self._folder.writable:
      raise page_store.read_only()
    if not self._choose(force):
      return 0
    lock = self._folder.lock_compaction()
    if lock is None:
      return 0  # another process is at it
    gone = 0
    try:
      self._refresh()
      while True:
        names = self._choose(force)
        if not names:
          return gone
        gone += self._merge(names)
    finally:
      os.close(lock)

  def _choose(self, force: bool) -> list[str]:
    with self._lock:
      segments = [s for s in self._index.segments.values() if s.namespace == self._index.namespace]
      candidates = [compaction.Candidate(s.name, s.pages, s.live_pages, s.used_s) for s in segments]
    return compaction.choose(candidates, self._batch_pages, force=force)

  def _merge(self, names: list[str]) -> int:
    """Moves the live pages of some segments into a new one. Returns how many were still there."""
    with self._lock:  # a write may have evicted some since they were chosen
      sources = [s for s in map(self._index.segments.get, names) if s is not None]
      reads = segment_reads.live_pages(sources)
    if not sources:
      return 0
    out = np.empty((len(reads.rows), self.page_bytes), np.uint8)
    right = np.zeros(len(out), bool)
    self._read(reads, out, right)
    if not right.all():
      out, reads = out[right], reads.take(right)
    keys, expected = reads.keys(), reads.expected()
    merged = self._save(out, keys, expected) if len(out) else None
    with self._lock:
      if merged is not None:
        merged.used_s = max(source.used_s for source in sources)
        for row in np.flatnonzero(reads.dead()).tolist():  # deleted meanwhile
          self._index.bury(merged, row)
      for source in sources:
        if source.name in self._index.segments:
          self._index.remove(source.name)
    for source in sources:
      self._folder.discard(source.name)
    self.stats["compactions"] += 1
    return len(sources)

  def clear(self) -> None:
    """Deletes all pages of every namespace."""
    self.flush()
    self._refresh(force=True)
    with self._lock:
      names = list(self._index.segments)
      for name in names:
        self._index.remove(name)
    for name in names:
      self._folder.discard(name)

  def usage(self) -> page_store.StoreUsage:
    with self._lock:
      self._refresh()
      return page_store.StoreUsage(
        pages=len(self._index), bytes=self._index.bytes, capacity_bytes=self._capacity_bytes,
        pending_pages=self._staging.pages,
      )  # fmt: skip

  def flush(self) -> None:
    self._staging.flush()

  def close(self) -> None:
    self._staging.close()
    self._readers.shutdown()
    while not self._savers.empty():
      self._savers.get().close()
    self._folder.close()
