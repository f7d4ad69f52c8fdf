"""The checksum of stored pages: multilinear hashing, twice as fast as CRC32 from Python.

For a page of 64-bit words w and fixed random odd 64-bit multipliers m, m':

  sum_i(m_i w_i) + rotate_29(sum_i(m'_i (w_i >> 32)))      mod 2^64

The first sum tells pages apart that differ in the low half of any word, the second those that
differ only in high halves, each with a chance of error of 2^-32 for any given pair of pages (Lemire
and Kaser, "Strongly universal string hashing is fast", The Computer Journal 2014). It protects
against faults, not against an adversary.
"""

import functools

import numpy as np

_SEED = 0x57A7A  # part of the file format
_HALF = np.uint64(32)
_BATCH_BYTES = 1 << 18  # stays in the second-level cache between the passes


@functools.lru_cache(maxsize=8)
def _multipliers(words: int) -> np.ndarray:
  """Odd multipliers for both sums: uint64 [2, words]."""
  rng = np.random.Generator(np.random.PCG64(_SEED))
  table = rng.integers(0, 1 << 64, size=(words, 2), dtype=np.uint64)
  return np.ascontiguousarray(table.T) | np.uint64(1)


def _words(pages: np.ndarray) -> np.ndarray:
  """Pages as words, zero-padded at the end: uint64 [pages, words]."""
  tail = -pages.shape[1] % 8
  if tail:
    pages = np.pad(pages, ((0, 0), (0, tail)))
  return pages.view("<u8")


def checksums(pages: np.ndarray) -> np.ndarray:
  """The checksums of `pages`, uint8 [n, page_bytes] with contiguous rows: uint64 [n]."""
  count, page_bytes = pages.shape
  low, high = _multipliers(-(-page_bytes // 8))
  batch = max(1, _BATCH_BYTES // page_bytes)
  result = np.empty(count, np.uint64)
  for start in range(0, count, batch):
    words = _words(pages[start : start + batch])
    first = np.vecdot(words, low)
    second = np.vecdot(words >> _HALF, high)
    result[start : start + batch] = first + ((second << np.uint64(29)) | (second >> np.uint64(35)))
  return result


def names(keys: np.ndarray) -> np.ndarray:
  """What ties a checksum to its page's key, by exclusive or: uint8 [n, 32] -> uint64 [n].

  With it a page in another's place is found out.
  """
  return np.ascontiguousarray(keys[:, :8]).view("<u8")[:, 0]
