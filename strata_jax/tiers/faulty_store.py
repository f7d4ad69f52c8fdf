"""A store whose medium misbehaves, by seed: for tests and for seeing how serving degrades."""

import dataclasses
import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from strata_jax import validation
from strata_jax.tiers import page_store
from strata_jax.tiers.memory_store import MemoryStore
from strata_jax.tiers.orbax_segments import OrbaxSegments
from strata_jax.tiers.segment_index import PAGES_FILE
from strata_jax.tiers.tensorstore_pages import TensorStorePages

DAMAGES = ("flip", "truncate", "empty", "swap")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
  """What goes wrong. Chances are per operation, those of damage per page read."""

  seed: int = 0
  delay_s: float = 0.0  # of every operation
  fail: float = 0.0  # a read or write fails
  flip: float = 0.0  # a bit of a page flips on the medium
  truncate: float = 0.0  # the medium loses a page's end, and what follows it in its file
  full_after_bytes: int | None = None  # writes beyond fail: no space
  read_only: bool = False

  def __post_init__(self) -> None:
    validation.check_number(self, "delay_s", minimum=0.0)
    for field in ("fail", "flip", "truncate"):
      validation.check_number(self, field, minimum=0.0)
    if self.full_after_bytes is not None:
      validation.check_int(self, "full_after_bytes", minimum=0)


class FaultyStore:
  """A `PageStore` in front of another one."""

  def __init__(self, store: page_store.PageStore, faults: Faults):
    self.inner = store
    self.page_bytes = store.page_bytes
    self.stats = store.stats
    self.faults = faults  # may be replaced while the store is used
    self._random = random.Random(faults.seed)
    self._lock = threading.Lock()
    self._written_bytes = 0

  def _happens(self, chance: float) -> bool:
    with self._lock:
      return self._random.random() < chance

  def longest_prefix(self, keys: Sequence[bytes]) -> int:
    time.sleep(self.faults.delay_s)
    if self._happens(self.faults.fail):
      return 0
    return self.inner.longest_prefix(keys)

  def contains(self, keys: Sequence[bytes]) -> np.ndarray:
    time.sleep(self.faults.delay_s)
    if self._happens(self.faults.fail):
      return np.zeros(len(keys), bool)
    return self.inner.contains(keys)

  def read(
    self, keys: Sequence[bytes], out: np.ndarray, rows: np.ndarray | None = None
  ) -> Future[np.ndarray]:
    result: Future[np.ndarray] = Future()

    def run() -> None:
      time.sleep(self.faults.delay_s)
      for key in keys:
        for kind, chance in (("flip", self.faults.flip), ("truncate", self.faults.truncate)):
          if chance and self._happens(chance):
            damage(self.inner, key, kind, seed=self._random.randrange(1 << 30))
      if self._happens(self.faults.fail):
        result.set_result(np.zeros(len(keys), bool))
        return
      self.inner.read(keys, out, rows).add_done_callback(
        lambda done: result.set_result(done.result())
      )

    threading.Thread(target=run, name="faulty-read", daemon=True).start()
    return result

  def write(
    self, keys: Sequence[bytes], pages: np.ndarray, rows: np.ndarray | None = None
  ) -> Future[int]:
    time.sleep(self.faults.delay_s)
    error = self._refusal(len(keys) * self.page_bytes)
    if error is None:
      return self.inner.write(keys, pages, rows)
    failed: Future[int] = Future()
    failed.set_exception(error)
    return failed

  def _refusal(self, size_bytes: int) -> OSError | None:
    if self.faults.read_only:
      return page_store.read_only()
    with self._lock:
      limit = self.faults.full_after_bytes
      if limit is not None and self._written_bytes + size_bytes > limit:
        return page_store.no_space()
      self._written_bytes += size_bytes
    if self._happens(self.faults.fail):
      return OSError("an injected fault")
    return None

  def delete(self, keys: Sequence[bytes]) -> int:
    time.sleep(self.faults.delay_s)
    return self.inner.delete(keys)

  def usage(self) -> page_store.StoreUsage:
    return self.inner.usage()

  def flush(self) -> None:
    self.inner.flush()

  def close(self) -> None:
    self.inner.close()


def damage(store: page_store.PageStore, key: bytes, kind: str, *, seed: int = 0) -> bool:
  """Damages a page on the medium, below all checks; whether the page was there.

  `flip`: one bit. `truncate`: the second half is gone, and in a segment what follows it. `empty`:
  all of the file. `swap`: the bytes of another page (of another key, where there is one).

  Raises:
    TypeError: a store whose medium is not known.
  """
  rng = random.Random(seed)
  if isinstance(store, MemoryStore):
    if not store.contains([key])[0]:
      return False
    store.damage(key, _damaged(store.peek(key), kind, rng))
    return True
  if isinstance(store, TensorStorePages):
    store.flush()
    return _damage_value(store, key, kind, rng)
  if isinstance(store, OrbaxSegments):
    store.flush()
    return _damage_segment(store, key, kind, rng)
  raise TypeError(f"expected a store with a known medium, got {type(store).__name__}")


def _damaged(page: np.ndarray, kind: str, rng: random.Random) -> np.ndarray:
  if kind == "truncate":
    return page[: page.size // 2]
  if kind == "empty":
    return page[:0]
  if kind == "swap":
    return np.roll(page, 1) ^ np.uint8(1)
  page[rng.randrange(page.size)] ^= 1 << rng.randrange(8)
  return page


def _damage_value(store: TensorStorePages, key: bytes, kind: str, rng: random.Random) -> bool:
  kv_store = store.kv_store
  result = kv_store.read(store.name(key)).result()
  if result.state != "value":
    return False
  value = np.frombuffer(result.value, np.uint8).copy()
  others = [other for other in store.list_keys() if other != key] if kind == "swap" else []
  if others:
    damaged = kv_store.read(store.name(rng.choice(others))).result().value
  else:
    damaged = _damaged(value, kind, rng).tobytes()
  kv_store.write(store.name(key), damaged).result()
  return True


def _damage_segment(store: OrbaxSegments, key: bytes, kind: str, rng: random.Random) -> bool:
  place = store.locate(key)
  if place is None:
    return False
  folder, row = place
  offset = row * store.page_bytes
  with open(os.path.join(folder, PAGES_FILE), "r+b") as file:
    if kind in ("truncate", "empty"):
      file.truncate(offset + store.page_bytes // 2 if kind == "truncate" else 0)
      return True
    file.seek(offset)
    page = np.frombuffer(file.read(store.page_bytes), np.uint8).copy()
    size = os.fstat(file.fileno()).st_size
    if page.size < store.page_bytes:
      return True  # damaged already
    if kind == "swap" and size > store.page_bytes:
      file.seek((offset + store.page_bytes) % size)
      damaged = file.read(store.page_bytes)
    else:
      damaged = _damaged(page, kind, rng).tobytes()
    file.seek(offset)
    file.write(damaged)
  return True
