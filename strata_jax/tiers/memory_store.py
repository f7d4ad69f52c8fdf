"""Pages in this process's memory: for tests and for trying things out."""

import collections
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from strata_jax.tiers import page_checksum, page_store


class MemoryStore:
  """A `PageStore` that is gone with its process. Evicts the least recently used page."""

  def __init__(self, *, page_bytes: int, capacity_bytes: int | None = None):
    if capacity_bytes is not None and capacity_bytes < page_bytes:
      raise ValueError(f"store: expected room for a page, {page_bytes} bytes, got {capacity_bytes}")
    self.page_bytes = page_bytes
    self.stats = {"evicted_pages": 0, "bad_pages": 0}
    self._capacity_bytes = capacity_bytes
    self._pages: collections.OrderedDict[bytes, tuple[np.ndarray, int]] = collections.OrderedDict()
    self._lock = threading.Lock()

  def longest_prefix(self, keys: Sequence[bytes]) -> int:
    return page_store.leading(self.contains(keys))

  def contains(self, keys: Sequence[bytes]) -> np.ndarray:
    with self._lock:
      return np.fromiter((key in self._pages for key in keys), bool, len(keys))

  def read(
    self, keys: Sequence[bytes], out: np.ndarray, rows: np.ndarray | None = None
  ) -> Future[np.ndarray]:
    page_store.check_pages(out, self.page_bytes)
    right = np.zeros(len(keys), bool)
    for i, row in enumerate(page_store.rows_of(rows, len(keys))):
      with self._lock:
        held = self._pages.get(keys[i])
        if held is None:
          continue
        self._pages.move_to_end(keys[i])
      page, checksum = held
      if page.size == self.page_bytes:
        out[row] = page
        right[i] = int(page_checksum.checksums(out[row : row + 1])[0]) == checksum
      if not right[i]:
        self.stats["bad_pages"] += 1
        self.delete([keys[i]])
    return page_store.done(right)

  def write(
    self, keys: Sequence[bytes], pages: np.ndarray, rows: np.ndarray | None = None
  ) -> Future[int]:
    page_store.check_pages(pages, self.page_bytes)
    new = 0
    for key, row in zip(keys, page_store.rows_of(rows, len(keys)), strict=True):
      page = pages[row].copy()
      checksum = int(page_checksum.checksums(page[None])[0])
      with self._lock:
        if key in self._pages:
          self._pages.move_to_end(key)
          continue
        while self._full():
          self._pages.popitem(last=False)
          self.stats["evicted_pages"] += 1
        self._pages[key] = (page, checksum)
        new += 1
    return page_store.done(new)

  def delete(self, keys: Sequence[bytes]) -> int:
    with self._lock:
      return sum(self._pages.pop(key, None) is not None for key in keys)

  def usage(self) -> page_store.StoreUsage:
    with self._lock:
      count = len(self._pages)
    return page_store.StoreUsage(
      pages=count, bytes=count * self.page_bytes, capacity_bytes=self._capacity_bytes
    )

  def damage(self, key: bytes, page: np.ndarray) -> None:
    """Replaces the bytes of a page, without its checksum: a fault of the medium, for tests."""
    with self._lock:
      self._pages[key] = (page, self._pages[key][1])

  def peek(self, key: bytes) -> np.ndarray:
    """A copy of the bytes held under a key."""
    with self._lock:
      return self._pages[key][0].copy()

  def flush(self) -> None:
    pass

  def close(self) -> None:
    pass

  def _full(self) -> bool:
    return (
      self._capacity_bytes is not None
      and (len(self._pages) + 1) * self.page_bytes > self._capacity_bytes
    )
