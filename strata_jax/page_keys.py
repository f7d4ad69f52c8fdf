"""Content keys of pages, chained from the root: the names by which lower tiers find pages again.

A key covers all that the bytes of a page depend on: the fingerprint of model and layout, salt,
adapter, and every token up to the end of the page. Standard library only, but for the arrays.
"""

import hashlib
from collections.abc import Iterator

import numpy as np

KEY_BYTES = 32


def root_key(fingerprint: str, salt: str = "", adapter: str = "") -> bytes:
  """The key that a namespace's first pages have as their parent."""
  digest = hashlib.blake2b(digest_size=KEY_BYTES)
  for part in (fingerprint, salt, adapter):  # lengths keep ("a", "b") apart from ("ab", "")
    data = part.encode()
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)
  return digest.digest()


def child_key(parent: bytes, page_tokens: np.ndarray) -> bytes:
  """The key of one page: int32 [page_size] tokens below the page named `parent`."""
  data = np.ascontiguousarray(page_tokens, dtype="<i4").data
  return hashlib.blake2b(data, key=parent, digest_size=KEY_BYTES).digest()


def iter_page_keys(parent: bytes, tokens: np.ndarray, page_size: int) -> Iterator[bytes]:
  """Keys of the whole pages of `tokens` below `parent`, made one at a time as asked for."""
  data = memoryview(np.ascontiguousarray(tokens, dtype="<i4")).cast("B")
  page_bytes = 4 * page_size
  key = parent
  for begin in range(0, len(data) // page_bytes * page_bytes, page_bytes):
    chunk = data[begin : begin + page_bytes]
    key = hashlib.blake2b(chunk, key=key, digest_size=KEY_BYTES).digest()
    yield key


def page_keys(parent: bytes, tokens: np.ndarray, page_size: int) -> list[bytes]:
  """Keys of all whole pages of `tokens`, in order; a partial last page has none."""
  return list(iter_page_keys(parent, tokens, page_size))
