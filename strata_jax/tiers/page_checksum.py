"""The checksum of stored pages, several times faster than CRC32 from Python.

A page is laid out as rows of 4 KiB. The sums of its rows and of its columns, 64-bit words modulo
2^64, take two passes at the speed of memory; with what is left over of the page they form a vector
v that is hashed with fixed random odd multipliers m, m':

  sum_i(m_i v_i) + rotate_29(sum_i(m'_i (v_i >> 32)))      mod 2^64

Two vectors that differ are told apart but for a chance of 2^-32 (multilinear hashing; Lemire and
Kaser, "Strongly universal string hashing is fast", The Computer Journal 2014). The sums of two
pages are equal only if their differences cancel in every row and every column, so at least four
words must differ, at the corners of a rectangle: bits that flip, sectors that are lost, stale,
shifted or in each other's place do not do that. It protects against faults, not an adversary.
"""

import functools

import numpy as np

_SEED = 0x57A7A  # part of the file format, as is the length of a row
_ROW_WORDS = 512
_ROW_BYTES = 8 * _ROW_WORDS
_HALF = np.uint64(32)
CACHE_BYTES = 1 << 18  # of pages stay in the second-level cache between the passes
_BLOCK_ROWS = CACHE_BYTES // _ROW_BYTES
_FINISH_BYTES = 1 << 16  # of sums are hashed at a time


@functools.lru_cache(maxsize=8)
def _multipliers(words: int) -> np.ndarray:
  """Odd multipliers for both sums: uint64 [2, words]."""
  rng = np.random.Generator(np.random.PCG64(_SEED))
  table = rng.integers(0, 1 << 64, size=(words, 2), dtype=np.uint64)
  return np.ascontiguousarray(table.T) | np.uint64(1)


def checksums(pages: np.ndarray) -> np.ndarray:
  """The checksums of `pages`, uint8 [n, page_bytes] with contiguous rows: uint64 [n]."""
  sums = empty_sums(*pages.shape)
  step = max(1, CACHE_BYTES // pages.shape[1])
  for at in range(0, len(pages), step):
    add_up(pages[at : at + step], sums[at : at + step])
  return finish(sums)


def empty_sums(count: int, page_bytes: int) -> np.ndarray:
  """Where `add_up` puts the sums of pages: uint64 [count, words]."""
  rows, left = divmod(page_bytes, _ROW_BYTES)
  return np.empty((count, (rows + _ROW_WORDS if rows else 0) + -(-left // 8)), "<u8")


def add_up(pages: np.ndarray, sums: np.ndarray) -> None:
  """Sums of rows, sums of columns, and what is left over, of pages that a cache holds.

  The first half of a checksum: the half that reads all bytes. `finish` is the other.

  Args:
    pages: uint8 [n, page_bytes], contiguous rows.
    sums: uint64 [n, words], of `empty_sums`; is filled.
  """
  count, page_bytes = pages.shape
  rows = page_bytes // _ROW_BYTES
  left = page_bytes - rows * _ROW_BYTES
  fixed = rows + _ROW_WORDS if rows else 0
  if rows:
    words = pages[:, : rows * _ROW_BYTES].view("<u8").reshape(count, rows, _ROW_WORDS)
    columns = sums[:, rows:fixed]
    np.add.reduce(words[:, :_BLOCK_ROWS], axis=2, out=sums[:, : min(rows, _BLOCK_ROWS)])
    np.add.reduce(words[:, :_BLOCK_ROWS], axis=1, out=columns)
    for at in range(_BLOCK_ROWS, rows, _BLOCK_ROWS):  # of a page that no cache holds
      block = words[:, at : at + _BLOCK_ROWS]
      np.add.reduce(block, axis=2, out=sums[:, at : min(at + _BLOCK_ROWS, rows)])
      columns += np.add.reduce(block, axis=1)
  if left:
    sums[:, -1] = 0  # pads the last word
    sums[:, fixed:].view(np.uint8)[:, :left] = pages[:, page_bytes - left :]


def finish(sums: np.ndarray) -> np.ndarray:
  """The checksums whose sums these are: uint64 [n, words] -> uint64 [n]."""
  step = max(1, _FINISH_BYTES // max(1, sums[:1].nbytes))
  parts = [_hash(sums[at : at + step]) for at in range(0, len(sums), step)]
  return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def _hash(vectors: np.ndarray) -> np.ndarray:
  """Multilinear hashes: uint64 [n, words] -> uint64 [n]."""
  low, high = _multipliers(vectors.shape[1])
  first = np.vecdot(vectors, low)
  second = np.vecdot(vectors >> _HALF, high)
  return first + ((second << np.uint64(29)) | (second >> np.uint64(35)))


def names(keys: np.ndarray) -> np.ndarray:
  """What ties a checksum to its page's key, by exclusive or: uint8 [n, 32] -> uint64 [n].

  With it a page in another's place is found out.
  """
  return np.ascontiguousarray(keys[:, :8]).view("<u8")[:, 0]
