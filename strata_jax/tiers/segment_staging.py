"""Pages that were handed over and wait to become a segment."""

import contextlib
import errno
import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from strata_jax.page_keys import KEY_BYTES
from strata_jax.tiers import page_checksum

_HASHED_STEPS = 16  # whose sums are finished together
log = logging.getLogger(__name__)


def _memory(pages: int, page_bytes: int) -> np.ndarray:
  """Fresh memory, uint8 [pages, page_bytes]; the system gives large pages of it faster."""
  memory = mmap.mmap(-1, pages * page_bytes)
  with contextlib.suppress(OSError, AttributeError):  # a system without them
    memory.madvise(mmap.MADV_HUGEPAGE)
  return np.frombuffer(memory, np.uint8).reshape(pages, page_bytes)


class Durable:
  """The future of one write, which may be spread over several segments."""

  def __init__(self) -> None:
    self.future: Future[int] = Future()
    self._lock = threading.Lock()
    self._pages = 0
    self._open = 1  # the write itself, until all its pages are handed over
    self._error: OSError | None = None

  def wait_for(self) -> None:
    """One more segment has pages of the write."""
    with self._lock:
      self._open += 1

  def arrived(self, pages: int, error: OSError | None = None) -> None:
    """A segment is durable, with so many new pages of the write, or has failed."""
    with self._lock:
      self._open -= 1
      self._pages += pages
      self._error = self._error or error
      if self._open:
        return
    if self._error:
      self.future.set_exception(self._error)
    else:
      self.future.set_result(self._pages)


class Batch:
  """Pages of one segment to be."""

  def __init__(self, pages: np.ndarray):
    self.pages = pages  # uint8 [capacity, page_bytes]
    self.keys = np.empty((len(pages), KEY_BYTES), np.uint8)
    self.checksums = np.empty(len(pages), np.uint64)  # without the keys' part
    self.count = 0  # rows filled so far
    self.rows: dict[bytes, int] = {}  # less what was dropped since
    self.since_s = time.monotonic()
    self._writes: dict[Durable, list[bytes]] = {}  # who waits for it, and with which new pages

  @property
  def room(self) -> int:
    return len(self.pages) - self.count

  def fill(self, keys: list[bytes], pages: np.ndarray, rows: np.ndarray) -> None:
    """Copies pages in; nobody may see them before `publish`."""
    step = max(1, page_checksum.CACHE_BYTES // pages.shape[1])
    for begin in range(0, len(keys), _HASHED_STEPS * step):
      taken = rows[begin : begin + _HASHED_STEPS * step]
      to = slice(self.count + begin, self.count + begin + len(taken))
      filled = self.pages[to]
      sums = page_checksum.empty_sums(*filled.shape)
      for at in range(0, len(taken), step):
        part = slice(at, at + step)
        np.take(pages, taken[part], axis=0, out=filled[part], mode="clip")
        page_checksum.add_up(filled[part], sums[part])
      self.checksums[to] = page_checksum.finish(sums)
    joined = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
    self.keys[self.count : self.count + len(keys)] = joined

  def publish(self, keys: list[bytes], write: Durable) -> None:
    """Makes the pages just filled in findable."""
    self.rows.update((key, self.count + i) for i, key in enumerate(keys))
    self.count += len(keys)
    self.join(write, keys)

  def join(self, write: Durable, new: list[bytes]) -> None:
    """The write waits for this batch."""
    if write not in self._writes:
      write.wait_for()
      self._writes[write] = []
    self._writes[write] += new

  def pack(self) -> None:
    """Closes the gaps of dropped pages; their places are given up for good."""
    kept = sorted(self.rows.items(), key=lambda item: item[1])
    for to, (_, row) in enumerate(kept):
      if to != row:
        self.pages[to], self.keys[to] = self.pages[row], self.keys[row]
        self.checksums[to] = self.checksums[row]
    self.rows = {key: to for to, (key, _) in enumerate(kept)}
    self.count = len(kept)

  def finish(self, error: OSError | None = None) -> None:
    """Tells everybody who waits."""
    for write, keys in self._writes.items():
      write.arrived(sum(key in self.rows for key in keys), error)


class Staging:
  """Fills batches from any thread and commits them, full or old enough, in threads of its own.

  Several commits at once: one waits for the disk while another copies. `lock` guards what `find`
  reads; commits run without it.
  """

  def __init__(
    self,
    *,
    page_bytes: int,
    batch_pages: int,
    linger_s: float,
    lock: threading.RLock,
    is_durable: Callable[[bytes], bool],
    commit: Callable[[Batch], None],
    idle: Callable[[], None],
    committers: int = 2,
  ):
    self._page_bytes = page_bytes
    self._batch_pages = batch_pages
    self._linger_s = linger_s
    self._lock = lock
    self._is_durable = is_durable
    self._commit = commit
    self._idle = idle
    self._filling = threading.Lock()  # one write at a time copies
    self._open: Batch | None = None
    self._pending: list[Batch] = []  # all that `find` looks at, the open one too
    self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
    self._free: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
    for _ in range(committers + 1):
      self._free.put(None)  # memory is taken when it is needed first
    self._committers = committers
    self._threads: list[threading.Thread] = []
    self._closed = False

  @property
  def pages(self) -> int:
    with self._lock:
      return sum(len(batch.rows) for batch in self._pending)

  def find(self, key: bytes) -> tuple[Batch, int] | None:
    """Where a page lies that is not durable yet. Under the lock."""
    for batch in self._pending:
      row = batch.rows.get(key)
      if row is not None:
        return batch, row
    return None

  def forget(self, key: bytes) -> bool:
    """Drops a page that is not durable yet. Under the lock."""
    found = self.find(key)
    if found is not None:
      del found[0].rows[key]
    return found is not None

  def add(self, keys: Sequence[bytes], pages: np.ndarray, rows: np.ndarray, write: Durable) -> None:
    """Hands over the pages that are new; waits while all buffers are full."""
    with self._filling:
      if self._closed:
        raise ValueError("the store is closed")
      keys, rows = self._new(keys, rows, write)
      while keys:
        batch = self._open or self._new_batch()
        part = keys[: batch.room]
        batch.fill(part, pages, rows[: len(part)])
        with self._lock:
          batch.publish(part, write)
        keys, rows = keys[len(part) :], rows[len(part) :]
        if not batch.room:
          self._send()

  def _new(
    self, keys: Sequence[bytes], rows: np.ndarray, write: Durable
  ) -> tuple[list[bytes], np.ndarray]:
    """The keys, and their rows, of pages that are neither durable nor pending."""
    new: dict[bytes, int] = {}
    with self._lock:
      for i, key in enumerate(keys):
        pending = self.find(key)
        if pending is not None:
          pending[0].join(write, [])
        elif not self._is_durable(key):
          new.setdefault(key, i)
    return list(new), rows[list(new.values())]

  def _new_batch(self) -> Batch:
    buffer = self._free.get()
    if buffer is None:
      buffer = _memory(self._batch_pages, self._page_bytes)
    batch = Batch(buffer)
    with self._lock:
      self._open = batch
      self._pending.append(batch)
    if len(self._threads) < self._committers:  # one more a batch: most stores need one only
      thread = threading.Thread(target=self._run, name="segments", daemon=True)
      self._threads.append(thread)
      thread.start()
    return batch

  def _send(self) -> None:
    batch, self._open = self._open, None
    if batch is not None:
      self._queue.put(batch)

  def flush(self) -> None:
    """Waits until everything handed over so far is durable or has failed."""
    with self._filling:
      self._send()
    waiter = Durable()
    with self._lock:
      for batch in self._pending:
        batch.join(waiter, [])
    waiter.arrived(0)
    waiter.future.exception()

  def close(self) -> None:
    self.flush()
    with self._filling:
      self._closed = True
      threads, self._threads = self._threads, []
    for _ in threads:
      self._queue.put(None)
    for thread in threads:
      thread.join()

  def _run(self) -> None:
    tick_s = max(0.01, self._linger_s / 4)
    while True:
      try:
        batch = self._queue.get(timeout=tick_s)
      except queue.Empty:
        self._send_old()
        self._idle()
        continue
      if batch is None:
        return
      error = None
      try:
        self._commit(batch)
      except OSError as caught:
        error = caught
      except Exception as caught:
        log.exception("a segment was lost")
        error = OSError(errno.EIO, str(caught))
      with self._lock:
        self._pending.remove(batch)
      batch.finish(error)
      self._free.put(batch.pages)

  def _send_old(self) -> None:
    """Commits what has waited long enough, though it fills no segment."""
    if not self._filling.acquire(blocking=False):
      return  # a write is under way: later
    try:
      if self._open is not None and time.monotonic() - self._open.since_s >= self._linger_s:
        self._send()
    finally:
      self._filling.release()
