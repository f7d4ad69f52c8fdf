"""Carries the work of the storage tier out, in threads, between a page store and the host pool."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from strata_jax.executors.look_up_keys import LookUpKeys
from strata_jax.executors.protocol import (
  LookUpDone,
  LookUpWork,
  PrefetchDone,
  PrefetchWork,
  SpillDone,
  SpillHanded,
  SpillWork,
  StorageEvent,
  StorageWork,
)
from strata_jax.page_keys import page_keys
from strata_jax.tiers import page_store

_READERS = 2
_KNOWN_LOOK_UPS = 64  # whose keys are kept for the reads that follow
log = logging.getLogger(__name__)

Post = Callable[[StorageEvent], None]


class StorageIo:
  """Look-ups, reads and writes; `submit` returns at once, events come through `post`.

  Faults of the store are answers like any other: nothing found, pages lost, a write refused. The
  first refused write is logged.
  """

  def __init__(
    self,
    store: page_store.PageStore,
    pages: np.ndarray,
    *,
    page_size: int,
    now_s: Callable[[], float],
    post: Post,
  ) -> None:
    """Takes over neither the store nor the memory: both have to live until `close` is over.

    Args:
      store: of pages as large as the pool's.
      pages: the host pool's memory, uint8 [slots, page_bytes].
      page_size: tokens of a page.
      now_s: the clock of the events.
      post: takes events, from any thread.

    Raises:
      ValueError: the store's pages have another size.
    """
    page_store.check_pages(pages, store.page_bytes)
    self._store = store
    self._pages = pages
    self._page_size = page_size
    self._now_s = now_s
    self._post = post
    self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="storage-read")
    self._writer = ThreadPoolExecutor(1, thread_name_prefix="storage-write")
    self._lock = threading.Lock()
    self._keys = LookUpKeys(page_size, capacity=_KNOWN_LOOK_UPS)
    self._warned = False

  def submit(self, work: StorageWork) -> None:
    """Starts work; its events (two for a write) come when they come."""
    if isinstance(work, SpillWork):
      self._writer.submit(self._spill, work)
    elif isinstance(work, PrefetchWork):
      self._readers.submit(self._prefetch, work)
    else:
      self._readers.submit(self._look_up, work)

  def flush(self) -> None:
    """Lets the store make everything durable that was submitted before."""
    self._writer.submit(self._store.flush)

  def close(self) -> None:
    """Ends the threads; what was not started is dropped."""
    for pool in (self._readers, self._writer):
      pool.shutdown(wait=True, cancel_futures=True)

  def _look_up(self, work: LookUpWork) -> None:
    pages = 0
    try:
      pages = self._store.longest_prefix(self._keys.of(work)[work.skip_pages :])
    except Exception as error:
      log.warning("storage: a look-up failed: %s", error)
    self._post(LookUpDone(work.work_id, self._now_s(), pages))

  def _prefetch(self, work: PrefetchWork) -> None:
    pages = 0
    try:
      keys = self._keys.of(work.look_up)[work.first_page :][: len(work.host_slots)]
      right = self._store.read(keys, self._pages, work.host_slots).result()
      pages = page_store.leading(right)
    except Exception as error:
      log.warning("storage: a read failed: %s", error)
    self._post(PrefetchDone(work.work_id, self._now_s(), pages))

  def _spill(self, work: SpillWork) -> None:
    keys = page_keys(work.parent_key, work.token_ids, self._page_size)
    try:
      written = self._store.write(keys[work.skip_pages :], self._pages, work.host_slots)
    except Exception as error:
      written = Future()
      written.set_exception(error)
    self._post(SpillHanded(work.work_id, self._now_s(), keys[-1]))
    written.add_done_callback(lambda done: self._spilled(work, done))

  def _spilled(self, work: SpillWork, written: Future) -> None:
    error = written.exception()
    if error is not None:
      with self._lock:
        first, self._warned = not self._warned, True
      level = logging.WARNING if first else logging.DEBUG
      log.log(level, "storage: pages were not written, serving goes on without: %s", error)
    self._post(SpillDone(work.work_id, self._now_s(), error is None))
