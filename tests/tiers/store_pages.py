"""Pages and keys for tests of page stores: the bytes follow from the key."""

import hashlib

import numpy as np


def keys_of(name: str, count: int) -> list[bytes]:
  """Distinct keys of 32 bytes."""
  return [hashlib.blake2b(f"{name}/{i}".encode(), digest_size=32).digest() for i in range(count)]


def page_of(key: bytes, page_bytes: int) -> np.ndarray:
  """The page that belongs to a key: uint8 [page_bytes]."""
  seed = int.from_bytes(key[:8], "little")
  words = np.random.Generator(np.random.SFC64(seed)).integers(
    0, 1 << 64, -(-page_bytes // 8), np.uint64
  )
  return words.view(np.uint8)[:page_bytes]


def pages_of(keys: list[bytes], page_bytes: int) -> np.ndarray:
  """uint8 [keys, page_bytes]."""
  return np.stack([page_of(key, page_bytes) for key in keys])


def check_read(store, keys: list[bytes]) -> np.ndarray:
  """Reads pages; every one that the store calls right must be. Which were: bool [keys]."""
  out = np.full((len(keys), store.page_bytes), 0xEE, np.uint8)
  right = store.read(keys, out).result(timeout=60)
  for i in np.flatnonzero(right):
    np.testing.assert_array_equal(out[i], page_of(keys[i], store.page_bytes), err_msg=f"page {i}")
  return right
