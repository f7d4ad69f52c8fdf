"""Pages in a TensorStore key-value store, one key a page: for storage that machines share.

The value of a page is its bytes and a trailer: a mark of the format and the checksum, tied to the
key. TensorStore's drivers write a value whole or not at all. Processes that share a store need no
coordination: a page that two write at once is written twice, to the same effect.
"""

import collections
import contextlib
import fcntl
import logging
import pathlib
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import tensorstore as ts

from strata_jax import page_keys
from strata_jax.tiers import page_checksum, page_store
from strata_jax.tiers.segment_index import namespace_of

_MAGIC = b"STRPAGE1"
_TRAILER = struct.Struct("<8sQ")  # magic, checksum
TRAILER_BYTES = _TRAILER.size
_LOOKUPS = 64  # look-ups under way at a time
_IN_FLIGHT_BYTES = 64 << 20  # of reads or writes under way
_BOUNDED = {"max_retries": 4, "initial_delay": "50ms", "max_delay": "1s"}
_CONTEXT = {  # a store that is down is given up soon: the tier can do without it
  "s3_request_retries": _BOUNDED,
  "gcs_request_retries": _BOUNDED,
}
log = logging.getLogger(__name__)


def open_kv_store(spec: str | dict) -> ts.KvStore:
  """Opens what a TensorStore URL or JSON object names. Raises ValueError."""
  try:
    return ts.KvStore.open(spec, context=ts.Context(_CONTEXT)).result()
  except (ValueError, NotImplementedError) as error:
    raise ValueError(f"store: {error}") from error


def sweep_files(kv_store: ts.KvStore) -> int:
  """Deletes what killed writers left in the folder of a `file` driver; how many files.

  TensorStore writes a value to a locked file beside its place and renames it.
  """
  spec = kv_store.spec().to_json()
  if spec["driver"] != "file":
    return 0
  swept = 0
  for path in pathlib.Path(spec["path"]).rglob("*.__lock"):
    with contextlib.suppress(OSError), path.open("r+b") as file:  # locked: its writer lives
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      path.unlink()
      swept += 1
  return swept


class TensorStorePages:
  """A `PageStore` over any TensorStore key-value driver.

  With a capacity it evicts the least recently used pages that it knows of: those listed when it was
  opened, as the oldest, then its own. Without one it keeps no list.
  """

  def __init__(
    self,
    spec: str | dict,
    *,
    page_bytes: int,
    fingerprint: str,
    capacity_bytes: int | None = None,
    timeout_s: float = 30.0,
  ):
    """Opens the store that a TensorStore URL or JSON object names.

    A medium that gives no answer for `timeout_s` counts as failing.

    Raises:
      ValueError: TensorStore does not understand the spec, or the capacity holds no page.
      OSError: the store cannot be listed.
    """
    self.page_bytes = page_bytes
    self._value_bytes = page_bytes + _TRAILER.size
    self._timeout_s = timeout_s
    self._capacity_bytes = capacity_bytes
    if capacity_bytes is not None and capacity_bytes < self._value_bytes:
      raise ValueError(f"store: expected a capacity >= {self._value_bytes}, got {capacity_bytes}")
    self.kv_store = open_kv_store(spec)
    self._namespace = namespace_of(fingerprint, page_bytes).hex()
    self.stats = dict.fromkeys(
      ("written_pages", "failed_writes", "evicted_pages", "bad_pages", "failed_reads"), 0
    )
    self._window = max(1, _IN_FLIGHT_BYTES // self._value_bytes)
    self._slots = threading.BoundedSemaphore(self._window)  # writes under way
    self._lock = threading.Lock()
    self._writes = threading.Condition(self._lock)
    self._pending: dict[bytes, Future[int]] = {}
    self._known: collections.OrderedDict[bytes, None] = collections.OrderedDict()  # oldest first
    if capacity_bytes is not None:
      sweep_files(self.kv_store)
      self._known.update(dict.fromkeys(self.list_keys()))

  def name(self, key: bytes) -> str:
    """The name of a page in the store."""
    text = key.hex()
    return f"{self._namespace}/{text[:2]}/{text}"

  def list_keys(self) -> list[bytes]:
    """All keys of this store's namespace, as the medium lists them."""
    prefix = self._namespace + "/"
    names = ts.KvStore.KeyRange(prefix, self._namespace + "0")
    try:
      listed = self.kv_store.list(names, strip_prefix_length=len(prefix) + 3)
      texts = listed.result(timeout=self._timeout_s)
    except (ValueError, TimeoutError) as error:
      raise OSError(f"store: cannot be listed: {error}") from error
    size = 2 * page_keys.KEY_BYTES
    return [bytes.fromhex(text.decode()) for text in texts if len(text) == size]

  # Look-up.

  def contains(self, keys: Sequence[bytes]) -> np.ndarray:
    present = np.zeros(len(keys), bool)
    for start, found in self._look_up(keys):
      present[start : start + len(found)] = found
    return present

  def longest_prefix(self, keys: Sequence[bytes]) -> int:
    pages = 0
    for start, found in self._look_up(keys):
      pages = start + page_store.leading(found)
      if pages < start + len(found):
        break
    return pages

  def _look_up(self, keys: Sequence[bytes]) -> Iterator[tuple[int, np.ndarray]]:
    """Reads the trailers of pages: there is no page without one at the right place.

    Yields the first index and bool [up to _LOOKUPS], part by part until one has no answer.
    """
    trailer = slice(self.page_bytes, self._value_bytes)
    for start in range(0, len(keys), _LOOKUPS):
      part = keys[start : start + _LOOKUPS]
      futures = [self.kv_store.read(self.name(key), byte_range=trailer) for key in part]
      until_s, silent = self._until_s(), False
      found = np.zeros(len(part), bool)
      for i, future in enumerate(futures):
        try:
          value = self._value(future, until_s, quiet=True)
        except TimeoutError:
          silent = True
          continue
        found[i] = value is not None and value[:8] == _MAGIC
      yield start, found
      if silent:
        return

  def _until_s(self) -> float:
    """When what is asked for now is given up."""
    return time.monotonic() + self._timeout_s

  def _value(self, future: ts.Future, until_s: float, *, quiet: bool = False) -> bytes | None:
    """The value read, or None where it is missing or cannot be read. Raises TimeoutError."""
    try:
      result = future.result(timeout=max(0.0, until_s - time.monotonic()))
    except (ValueError, TimeoutError) as error:
      if not quiet or "OUT_OF_RANGE" not in str(error):
        self._failed("failed_reads", "a page cannot be read", error)
      if isinstance(error, TimeoutError):
        raise
      return None
    return result.value if result.state == "value" else None

  def _failed(self, counter: str, what: str, error: Exception) -> None:
    with self._lock:
      self.stats[counter] += 1
      first = self.stats[counter] == 1
    level = logging.WARNING if first else logging.DEBUG
    log.log(level, "store: %s: %s", what, error if str(error) else self._no_answer())

  def _no_answer(self) -> OSError:
    return OSError(f"store: no answer within {self._timeout_s:g} s")

  # Reading.

  def read(
    self, keys: Sequence[bytes], out: np.ndarray, rows: np.ndarray | None = None
  ) -> Future[np.ndarray]:
    page_store.check_pages(out, self.page_bytes)
    places = page_store.rows_of(rows, len(keys))
    result: Future[np.ndarray] = Future()
    thread = threading.Thread(
      target=_settle, args=(result, self._read, keys, out, places), name="store-read", daemon=True
    )
    thread.start()
    return result

  def _read(self, keys: Sequence[bytes], out: np.ndarray, rows: np.ndarray) -> np.ndarray:
    right = np.zeros(len(keys), bool)
    futures: collections.deque[tuple[ts.Future, float]] = collections.deque()
    asked = 0
    for i, key in enumerate(keys):
      while asked < len(keys) and len(futures) < self._window:
        futures.append((self.kv_store.read(self.name(keys[asked])), self._until_s()))
        asked += 1
      try:
        value = self._value(*futures.popleft())
      except TimeoutError:  # nor is the rest waited for
        break
      if value is not None:
        right[i] = self._take(key, value, out[rows[i] : rows[i] + 1])
    self._use([key for key, good in zip(keys, right, strict=True) if good])
    return right

  def _take(self, key: bytes, value: bytes, out: np.ndarray) -> bool:
    """Copies a page out of its value, uint8 [1, page_bytes], if it is right."""
    reason = f"{len(value)} bytes, not {self._value_bytes}"
    if len(value) == self._value_bytes:
      reason = fault_of(key, value)
    if not reason:
      out[0] = np.frombuffer(value, np.uint8, self.page_bytes)
      return True
    with self._lock:
      self.stats["bad_pages"] += 1
    log.warning("store: page %s is a miss: %s", self.name(key), reason)
    self.delete([key])
    return False

  def _use(self, keys: Sequence[bytes]) -> None:
    """Notes keys as just used."""
    if self._capacity_bytes is None:
      return
    with self._lock:
      for key in keys:
        self._known[key] = None
        self._known.move_to_end(key)

  # Writing.

  def write(
    self, keys: Sequence[bytes], pages: np.ndarray, rows: np.ndarray | None = None
  ) -> Future[int]:
    page_store.check_pages(pages, self.page_bytes)
    places = page_store.rows_of(rows, len(keys))
    present = self.contains(keys)
    self._use([key for key, there in zip(keys, present, strict=True) if there])
    parts: list[Future[int]] = []
    for key, row, there in zip(keys, places, present, strict=True):
      if not there:
        parts.append(self._write_page(key, pages[row : row + 1]))
    return _sum(parts)

  def _write_page(self, key: bytes, page: np.ndarray) -> Future[int]:
    with self._lock:
      if key in self._pending:
        return _nothing_new(self._pending[key])
      future: Future[int] = Future()
      self._pending[key] = future
    value = page.tobytes() + _TRAILER.pack(_MAGIC, _checksum(key, page))
    if not (self._make_room() and self._slots.acquire(timeout=self._timeout_s)):
      self._give_up([key])
      raise self._no_answer()
    self.kv_store.write(self.name(key), value).add_done_callback(
      lambda written: self._written(key, future, written)
    )
    return future

  def _written(self, key: bytes, future: Future[int], written: ts.Future) -> None:
    self._slots.release()
    error = written.exception()
    if error is None:
      self._use([key])
    else:
      self._failed("failed_writes", "a page cannot be written", error)
    with self._lock:
      self.stats["written_pages"] += error is None
      if self._pending.get(key) is not future:  # given up meanwhile
        return
      del self._pending[key]
    if error is None:
      future.set_result(1)
    else:
      future.set_exception(OSError(f"store: a page cannot be written: {error}"))
    with self._lock:
      self._writes.notify_all()

  def _give_up(self, keys: Sequence[bytes]) -> None:
    """Waits no longer for these writes."""
    with self._lock:
      futures = [self._pending.pop(key) for key in keys if key in self._pending]
      self._writes.notify_all()
    for future in futures:
      error = self._no_answer()
      self._failed("failed_writes", "a page cannot be written", error)
      future.set_exception(error)

  def _make_room(self) -> bool:
    """Evicts down to the capacity; whether the medium answered."""
    if self._capacity_bytes is None:
      return True
    victims = []
    with self._lock:
      held = len(self._known) + len(self._pending)
      while self._known and held * self._value_bytes > self._capacity_bytes:
        victims.append(self._known.popitem(last=False)[0])
        held -= 1
      self.stats["evicted_pages"] += len(victims)
    return self._delete(victims)

  def delete(self, keys: Sequence[bytes]) -> int:
    with self._lock:
      self._writes.wait_for(lambda: self._pending.keys().isdisjoint(keys), self._timeout_s)
    present = self.contains(keys)
    with self._lock:
      for key in keys:
        self._known.pop(key, None)
    self._delete(keys)
    return int(np.count_nonzero(present))

  def _delete(self, keys: Sequence[bytes]) -> bool:
    """Whether the medium answered."""
    answered = True
    futures = [self.kv_store.write(self.name(key), None) for key in keys]
    until_s = self._until_s()
    for future in futures:
      try:
        future.result(timeout=max(0.0, until_s - time.monotonic()))
      except (ValueError, TimeoutError) as error:
        self._failed("failed_writes", "a page cannot be deleted", error)
        answered &= not isinstance(error, TimeoutError)
    return answered

  # Upkeep.

  def usage(self) -> page_store.StoreUsage:
    """Without a capacity the store is listed, which may wait for the medium."""
    with self._lock:
      pages = len(self._known)
      pending = len(self._pending)
    if self._capacity_bytes is None:
      pages = len(self.list_keys())
    return page_store.StoreUsage(
      pages=pages, bytes=pages * self._value_bytes, capacity_bytes=self._capacity_bytes,
      pending_pages=pending,
    )  # fmt: skip

  def clear(self) -> None:
    """Deletes all pages of every namespace."""
    self.flush()
    self.kv_store.delete_range(ts.KvStore.KeyRange()).result()
    with self._lock:
      self._known.clear()

  def flush(self) -> None:
    with self._lock:
      while self._pending and self._writes.wait(self._timeout_s):
        pass  # as long as one write after the other ends
      stuck = list(self._pending)
    self._give_up(stuck)

  def close(self) -> None:
    self.flush()


def _checksum(key: bytes, page: np.ndarray) -> int:
  """The checksum of a page, uint8 [1, page_bytes], tied to its key."""
  named = page_checksum.names(np.frombuffer(key, np.uint8)[None])
  return int((page_checksum.checksums(page) ^ named)[0])


def fault_of(key: bytes, value: bytes) -> str:
  """What is wrong with a page's value as stored; empty if it is right."""
  page_bytes = len(value) - _TRAILER.size
  if page_bytes < 1:
    return f"only {len(value)} bytes"
  magic, checksum = _TRAILER.unpack_from(value, page_bytes)
  if magic != _MAGIC:
    return "no trailer, or one of another format"
  if _checksum(key, np.frombuffer(value, np.uint8, page_bytes)[None]) != checksum:
    return "it fails its checksum"
  return ""


def _settle(future: Future, function: Callable, *arguments) -> None:
  """Runs a function for a future."""
  try:
    future.set_result(function(*arguments))
  except Exception as error:
    future.set_exception(error)


def _nothing_new(other: Future[int]) -> Future[int]:
  """Done with 0 when the other is done, failed when it failed."""
  future: Future[int] = Future()

  def follow(_: Future[int]) -> None:
    error = other.exception()
    if error is None:
      future.set_result(0)
    else:
      future.set_exception(error)

  other.add_done_callback(follow)
  return future


def _sum(parts: Sequence[Future[int]]) -> Future[int]:
  """Done when all parts are, with their sum; failed as soon as all are done and one failed."""
  total: Future[int] = Future()
  lock = threading.Lock()
  left = len(parts)

  def one_done(_: Future[int]) -> None:
    nonlocal left
    with lock:
      left -= 1
      if left:
        return
    errors = [error for part in parts if (error := part.exception())]
    if errors:
      total.set_exception(errors[0])
    else:
      total.set_result(sum(part.result() for part in parts))

  if not parts:
    total.set_result(0)
  for part in parts:
    part.add_done_callback(one_done)
  return total
