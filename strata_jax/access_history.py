"""A bounded table of how often evicted pages were accessed.

An access of a page is an access of every page before it, so counts never rise along a path. That
mends what the table's bound loses: the count of a page is at least that of any page after it.
"""

import numpy as np

_POWER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses nothing
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)
_MAX_COUNT = 255


class AccessHistory:
  """Counts by a 64-bit hash of all tokens up to a page's end; direct-mapped, newest wins."""

  def __init__(self, page_size: int, entries: int) -> None:
    """`entries` is rounded down to a power of two; 9 bytes each, touched as they are used."""
    bits = max(entries.bit_length() - 1, 1)
    self.page_size = page_size
    self._index_shift = np.uint64(64 - bits)
    self._keys = np.zeros(1 << bits, np.uint64)
    self._counts = np.zeros(1 << bits, np.uint8)
    self._powers = np.ones(1, np.uint64)

  def page_hashes(self, prefix_hash: int, start: int, tokens: np.ndarray) -> np.ndarray:
    """Hashes at the end of each page of `tokens`, which begin at prompt position `start`.

    `prefix_hash` is the last page's hash of what lies before. Returns uint64 [pages].
    """
    if start + len(tokens) > len(self._powers):
      powers = np.full(max(start + len(tokens), 2 * len(self._powers)), _POWER)
      powers[0] = 1
      self._powers = np.multiply.accumulate(powers)
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _MIX
    mixed ^= mixed >> _SHIFT
    mixed *= self._powers[start : start + len(tokens)]
    sums = np.add.accumulate(mixed)[self.page_size - 1 :: self.page_size]
    return sums + np.uint64(prefix_hash)

  def record(self, hashes: np.ndarray, count: int) -> None:
    """Remembers `count` for pages that are evicted."""
    index = self._index(hashes)
    self._keys[index] = hashes
    self._counts[index] = min(count, _MAX_COUNT)

  def lookup(self, hashes: np.ndarray) -> np.ndarray:
    """Counts of consecutive pages of one path, 0 where unknown: uint8 [pages], never rising."""
    index = self._index(hashes)
    counts = np.where(self._keys[index] == hashes, self._counts[index], np.uint8(0))
    return np.maximum.accumulate(counts[::-1])[::-1]

  def clear(self) -> None:
    self._counts[:] = 0

  def _index(self, hashes: np.ndarray) -> np.ndarray:
    return (hashes * _POWER) >> self._index_shift
