"""The third tier: pages of KV kept by content, on a disk or in a store shared by machines.

A page is `page_bytes` raw bytes under a key (see `page_keys`), a chained digest that covers the
model and layout, the salt, the adapter and every token up to the page's end. Equal keys mean equal
bytes, so a page that is present is never written again.
"""

import dataclasses
import errno
import json
import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

DEFAULT_SEGMENT_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoreUsage:
  """What a store holds; `bytes` counts everything it takes, indices and dead pages included."""

  pages: int
  bytes: int
  capacity_bytes: int | None  # None: no bound
  pending_pages: int = 0  # handed over, not durable yet


class PageStore(Protocol):
  """Keeps pages by key. Safe to use from several threads.

  Faults of the medium never raise out of `longest_prefix` and `read`: a page that is missing, short
  or fails its checksum is a miss, logged and counted in `stats`.
  """

  page_bytes: int
  stats: dict[str, int]

  def longest_prefix(self, keys: Sequence[bytes]) -> int:
    """How many leading keys are present. May wait for the medium."""
    ...

  def contains(self, keys: Sequence[bytes]) -> np.ndarray:
    """Which keys are present: bool [keys]. May wait for the medium."""
    ...

  def read(
    self, keys: Sequence[bytes], out: np.ndarray, rows: np.ndarray | None = None
  ) -> Future[np.ndarray]:
    """Reads page i into `out[rows[i]]` (`out[i]` without rows); gives bool [keys]: which are right.

    `out` is uint8 [any, page_bytes] with contiguous rows and belongs to the store until the future
    is done. Rows of pages that are not right hold anything.
    """
    ...

  def write(
    self, keys: Sequence[bytes], pages: np.ndarray, rows: np.ndarray | None = None
  ) -> Future[int]:
    """Hands over the pages `pages[rows[i]]` (`pages[i]` without rows) under their keys.

    When it returns, `pages` may be used again; it waits while too much is pending. The future is
    done once all of them are durable, with the number of pages that were not there before, or
    fails with the medium's OSError. Then they are found; a store may find them sooner.
    """
    ...

  def delete(self, keys: Sequence[bytes]) -> int:
    """Forgets pages; the number that were present. Space may come back later, by compaction."""
    ...

  def usage(self) -> StoreUsage: ...

  def flush(self) -> None:
    """Waits until everything handed over is durable or has failed."""
    ...

  def close(self) -> None:
    """Flushes and ends the store's threads. Twice does nothing."""
    ...


def rows_of(rows: np.ndarray | None, count: int) -> np.ndarray:
  """Rows of pages i = 0..count-1: int64 [count]."""
  if rows is None:
    return np.arange(count)
  if len(rows) != count:
    raise ValueError(f"expected one row a key, {count}, got {len(rows)}")
  return np.asarray(rows, np.int64)


def check_pages(pages: np.ndarray, page_bytes: int) -> None:
  """Raises ValueError unless `pages` is uint8 [any, page_bytes] with contiguous rows."""
  if pages.dtype != np.uint8 or pages.ndim != 2 or pages.shape[1] != page_bytes:
    raise ValueError(f"expected uint8 [pages, {page_bytes}], got {pages.dtype} {pages.shape}")
  if not pages.flags.c_contiguous:
    raise ValueError("expected contiguous pages, got a strided array")


def leading(present: np.ndarray) -> int:
  """The number of leading true entries of a bool array."""
  return len(present) if present.all() else int(np.argmin(present))


def done(value: object) -> Future:
  """A future that is done."""
  future: Future = Future()
  future.set_result(value)
  return future


def no_space() -> OSError:
  """The error of a full medium."""
  return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_only() -> OSError:
  """The error of a medium that cannot be written."""
  return OSError(errno.EROFS, os.strerror(errno.EROFS))


def open_store(
  url: str,
  *,
  page_bytes: int,
  fingerprint: str,
  capacity_bytes: int | None = None,
  segment_bytes: int = DEFAULT_SEGMENT_BYTES,
) -> PageStore:
  """Opens, or makes, the store that `url` names.

  - a path, or `orbax://PATH`: Orbax segments in that folder
  - `memory://`: in this process only
  - any other URL, or a JSON object: one page a key in that TensorStore key-value store, such as
    `file:///folder/`, `s3://bucket/path/` or `{"driver": "s3", "bucket": ..., "endpoint": ...}`;
    credentials are found as TensorStore does

  Pages written under another fingerprint or with another size are never found.

  Raises:
    ValueError: the URL names nothing that can be opened.
    OSError: the medium cannot be read.
  """
  # Each store's own libraries are imported only when it is used.
  if url.startswith("memory://"):
    from strata_jax.tiers.memory_store import MemoryStore

    return MemoryStore(page_bytes=page_bytes, capacity_bytes=capacity_bytes)
  if is_key_value(url):
    from strata_jax.tiers.tensorstore_pages import TensorStorePages

    return TensorStorePages(
      parse_spec(url), page_bytes=page_bytes, fingerprint=fingerprint, capacity_bytes=capacity_bytes
    )
  from strata_jax.tiers.orbax_segments import OrbaxSegments

  return OrbaxSegments(
    folder_of(url), page_bytes=page_bytes, fingerprint=fingerprint, capacity_bytes=capacity_bytes,
    segment_bytes=segment_bytes,
  )  # fmt: skip


def is_key_value(url: str) -> bool:
  """Whether a URL names a TensorStore key-value store."""
  return url.lstrip().startswith("{") or ("://" in url and not url.startswith("orbax://"))


def folder_of(url: str) -> str:
  """The folder of Orbax segments that a path or `orbax://PATH` names."""
  folder = url.removeprefix("orbax://")
  if not folder:
    raise ValueError(f"store: expected a folder, got {url!r}")
  return os.path.abspath(folder)


def parse_spec(url: str) -> str | dict:
  """A TensorStore URL or JSON object, as TensorStore takes it."""
  if not url.lstrip().startswith("{"):
    return url if url.endswith("/") else url + "/"
  try:
    spec = json.loads(url)
  except json.JSONDecodeError as error:
    raise ValueError(f"store: expected a JSON object, got {url!r}: {error}") from None
  path = spec.get("path", "")
  if path and not path.endswith("/"):
    spec["path"] = path + "/"
  return spec
