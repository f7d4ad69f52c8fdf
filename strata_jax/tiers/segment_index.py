"""What a segment holds, and where in a folder of segments a page lies.

A segment is a folder committed by Orbax with two uncompressed arrays of one chunk, so that each is
one raw file: `pages/0.0`, uint8 [pages, page_bytes], and `index/0`, which this module reads and
writes: a header, the keys, the checksums and a digest of all three. Pages that were deleted, or
found to be bad, are listed in the file `dead`.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import struct
import time
from collections.abc import Iterable, Sequence

import numpy as np

from strata_jax.page_keys import KEY_BYTES
from strata_jax.tiers import page_checksum

PAGES_FILE = "pages/0.0"
INDEX_FILE = "index/0"
DEAD_FILE = "dead"
NAMESPACE_BYTES = 16
_MAGIC = b"STRSEG01"
_HEADER = struct.Struct(f"<8sQQ{NAMESPACE_BYTES}s")  # magic, page_bytes, pages, namespace
_DIGEST_BYTES = 16
_TOUCH_S = 30.0  # how stale the recency on disk may get
_ROW_BITS = 32


def namespace_of(fingerprint: str, page_bytes: int) -> bytes:
  """What separates the pages of one model and layout from all others: 16 bytes."""
  text = f"{page_bytes}:{fingerprint}".encode()
  return hashlib.blake2b(text, digest_size=NAMESPACE_BYTES).digest()


def encode_index(
  namespace: bytes, page_bytes: int, keys: np.ndarray, checksums: np.ndarray
) -> np.ndarray:
  """The index of a segment: keys uint8 [pages, 32], checksums uint64 [pages] -> uint8 [bytes]."""
  body = _HEADER.pack(_MAGIC, page_bytes, len(keys), namespace)
  body += keys.tobytes() + checksums.astype("<u8").tobytes()
  digest = hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
  return np.frombuffer(body + digest, np.uint8)


def decode_index(data: bytes) -> tuple[bytes, int, np.ndarray, np.ndarray]:
  """Namespace, page_bytes, keys uint8 [pages, 32] and checksums uint64 [pages] of an index.

  Raises:
    ValueError: it is not a whole index.
  """
  body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
  if len(body) < _HEADER.size:
    raise ValueError(f"an index of {len(data)} bytes")
  if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
    raise ValueError("the index fails its digest")
  magic, page_bytes, count, namespace = _HEADER.unpack_from(body)
  if magic != _MAGIC or len(body) != _HEADER.size + count * (KEY_BYTES + 8):
    raise ValueError("an index of another format")
  keys = np.frombuffer(body, np.uint8, count * KEY_BYTES, _HEADER.size).reshape(count, KEY_BYTES)
  checksums = np.frombuffer(body, "<u8", count, _HEADER.size + count * KEY_BYTES)
  return namespace, page_bytes, keys, checksums


class RawFile:
  """An open file that closes when nobody uses it any more: eviction does not wait for readers."""

  def __init__(self, path: str):
    self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

  def __del__(self):
    if hasattr(self, "fd"):
      os.close(self.fd)


@dataclasses.dataclass(kw_only=True, eq=False)
class Segment:
  """One committed segment, as this process knows it."""

  path: str
  namespace: bytes
  page_bytes: int
  keys: np.ndarray  # uint8 [pages, 32]
  expected: np.ndarray  # uint64 [pages]: checksum without the key's part
  dead: np.ndarray  # bool [pages]: deleted or bad
  shadowed: np.ndarray  # bool [pages]: another segment has the page too
  bytes: int  # of all files
  used_s: float  # wall clock: shared by processes through the folder's time stamp
  touched_s: float
  number: int = -1  # in the index that holds it
  file: RawFile | None = None

  @property
  def name(self) -> str:
    return os.path.basename(self.path)

  @property
  def pages(self) -> int:
    return len(self.keys)

  @property
  def live(self) -> np.ndarray:
    """bool [pages]."""
    return ~(self.dead | self.shadowed)

  @property
  def live_pages(self) -> int:
    return int(np.count_nonzero(self.live))

  def key(self, row: int) -> bytes:
    return self.keys[row].tobytes()

  def open(self) -> RawFile:
    """The open file of pages. Raises FileNotFoundError when another process took it away."""
    if self.file is None:
      self.file = RawFile(os.path.join(self.path, PAGES_FILE))
    return self.file

  def touch(self) -> None:
    """Notes a use; now and then also where other processes and later ones see it."""
    self.used_s = time.time()
    if self.used_s - self.touched_s > _TOUCH_S:
      self.touched_s = self.used_s
      _ignore_os_errors(os.utime, self.path)

  def used_elsewhere(self) -> bool:
    """Whether another process used it since this one last looked."""
    try:
      used_s = os.stat(self.path).st_mtime
    except OSError:
      return False
    later = used_s > self.used_s + 1e-3
    self.used_s = max(self.used_s, used_s)
    return later

  def bury(self, row: int) -> None:
    """Notes a dead page, on disk as well where that can be written."""
    self.dead[row] = True
    path = os.path.join(self.path, DEAD_FILE)
    _ignore_os_errors(_replace, path, np.packbits(self.dead).tobytes())
    _ignore_os_errors(os.utime, self.path, (self.used_s, self.used_s))


def _ignore_os_errors(function, *arguments) -> None:
  """For notes that may be lost: on a read-only medium, or when another process was faster."""
  with contextlib.suppress(OSError):
    function(*arguments)


def _replace(path: str, data: bytes) -> None:
  with open(path + ".new", "wb") as file:
    file.write(data)
  os.replace(path + ".new", path)


def folder_bytes(path: str) -> int:
  """The size of all files below a folder."""
  total = 0
  for entry in os.scandir(path):
    total += folder_bytes(entry.path) if entry.is_dir() else entry.stat().st_size
  return total


def load_segment(path: str) -> Segment:
  """Reads what a committed segment holds.

  Raises:
    FileNotFoundError: it is not there, or not any more.
    ValueError: it is no whole segment; the reason.
  """
  try:
    with open(os.path.join(path, INDEX_FILE), "rb") as file:
      namespace, page_bytes, keys, checksums = decode_index(file.read())
    whole = os.stat(os.path.join(path, PAGES_FILE)).st_size // page_bytes
  except FileNotFoundError as error:
    if os.path.isdir(path):  # segments come and go as a whole
      raise ValueError(f"{error.filename} is missing") from None
    raise
  dead = np.arange(len(keys)) >= whole
  try:
    with open(os.path.join(path, DEAD_FILE), "rb") as file:
      noted = np.unpackbits(np.frombuffer(file.read(), np.uint8), count=len(keys))
    dead |= noted.astype(bool)
  except FileNotFoundError:
    pass
  used_s = os.stat(path).st_mtime
  return Segment(
    path=path, namespace=namespace, page_bytes=page_bytes, keys=keys,
    expected=checksums ^ page_checksum.names(keys), dead=dead, shadowed=np.zeros(len(keys), bool),
    bytes=folder_bytes(path), used_s=used_s, touched_s=used_s,
  )  # fmt: skip


class SegmentIndex:
  """Where the pages of one namespace lie. Not thread safe.

  It knows the segments of other namespaces too, for the space they take. A page that two segments
  hold, because two processes wrote it at once or a compaction was cut short, counts for the one
  with the lesser name: all processes agree on that.
  """

  def __init__(self, namespace: bytes):
    self.namespace = namespace
    self.segments: dict[str, Segment] = {}
    self.bytes = 0
    self._numbered: dict[int, Segment] = {}
    self._next_number = 0
    self._where: dict[bytes, int] = {}  # key: segment number and row

  def __len__(self) -> int:
    return len(self._where)

  def __contains__(self, key: bytes) -> bool:
    return key in self._where

  def keys(self) -> list[bytes]:
    return list(self._where)

  def find(self, key: bytes) -> tuple[Segment, int] | None:
    """The segment and row that hold a page."""
    code = self._where.get(key)
    if code is None:
      return None
    return self._numbered[code >> _ROW_BITS], code & ((1 << _ROW_BITS) - 1)

  def find_all(self, keys: Sequence[bytes]) -> np.ndarray:
    """Where pages lie, for `places`; negative where there is none: int64 [keys]."""
    return np.fromiter(map(self._where.get, keys, itertools.repeat(-1)), np.int64, len(keys))

  def places(self, found: np.ndarray) -> tuple[list[Segment], np.ndarray, np.ndarray]:
    """Segments, and for each place that `find_all` found its segment among them and its row."""
    numbers, which = np.unique(found >> _ROW_BITS, return_inverse=True)
    segments = [self._numbered[number] for number in numbers.tolist()]
    return segments, which, found & ((1 << _ROW_BITS) - 1)

  def add(self, segment: Segment) -> None:
    """Takes in a segment that is not there yet."""
    assert segment.name not in self.segments, segment.name
    segment.number = self._next_number
    self._next_number += 1
    self.segments[segment.name] = segment
    self._numbered[segment.number] = segment
    self.bytes += segment.bytes
    if segment.namespace == self.namespace:
      self._claim(segment, np.flatnonzero(~segment.dead))

  def _claim(self, segment: Segment, rows: np.ndarray) -> None:
    """Makes the segment the place of the pages in its rows where it has the better right."""
    base = segment.number << _ROW_BITS
    for row in rows.tolist():
      key = segment.key(row)
      held = self.find(key)
      if held is not None and held[0].name <= segment.name:
        segment.shadowed[row] = True
        continue
      if held is not None:
        held[0].shadowed[held[1]] = True
      segment.shadowed[row] = False
      self._where[key] = base | row

  def remove(self, name: str) -> None:
    """Forgets a segment; what others held in its shadow counts again."""
    segment = self.segments.pop(name)
    del self._numbered[segment.number]
    self.bytes -= segment.bytes
    if segment.namespace != self.namespace:
      return
    self._release(segment, np.flatnonzero(segment.live))

  def _release(self, segment: Segment, rows: Iterable[int]) -> None:
    keys = {segment.key(row) for row in rows}
    for key in keys:
      del self._where[key]
    for other in self.segments.values():
      hidden = np.flatnonzero(other.shadowed & ~other.dead)
      again = [row for row in hidden.tolist() if other.key(row) in keys]
      if again:
        self._claim(other, np.array(again))

  def bury(self, segment: Segment, row: int) -> None:
    """A page is deleted, or was found to be bad."""
    if segment.dead[row]:
      return
    was_live = not segment.shadowed[row]
    segment.bury(row)
    if was_live and self.segments.get(segment.name) is segment:
      self._release(segment, [row])

  def oldest(self) -> Segment | None:
    """The least recently used segment of any namespace."""
    return min(self.segments.values(), key=lambda s: (s.used_s, s.name), default=None)
