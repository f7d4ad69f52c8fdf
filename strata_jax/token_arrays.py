"""Token ids as int32 arrays: checked, compared, kept."""

from typing import Any

import numpy as np

_ONE_GO = 4096  # tokens compared at once before long runs are cut into blocks
_BLOCK = 16384  # stays in the L1 / L2 cache


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
  """How many leading tokens two int32 arrays of one length share."""
  length = len(first)
  start, stop = 0, min(length, _ONE_GO)
  while start < stop:
    differs = first[start:stop] != second[start:stop]
    at = int(differs.argmax())
    if differs[at]:
      return start + at
    start, stop = stop, min(length, stop + _BLOCK)
  return length


def as_tokens(tokens: Any) -> np.ndarray:
  """int32 [tokens], checked; the same array when it is one already."""
  array = np.asarray(tokens)
  if array.dtype != np.int32:
    limits = np.iinfo(np.int32)
    if array.size and not (
      np.issubdtype(array.dtype, np.integer)
      and limits.min <= array.min()
      and array.max() <= limits.max
    ):
      raise ValueError(f"tokens: expected 32-bit integers, got {array.dtype} {array!r}")
    array = array.astype(np.int32)
  if array.ndim != 1:
    raise ValueError(f"tokens: expected one dimension, got shape {array.shape}")
  return array


def keep(tokens: np.ndarray) -> np.ndarray:
  """Tokens that nobody changes and that hold no much larger array in memory."""
  if not tokens.flags.writeable:
    base = tokens.base
    if base is None or 2 * tokens.nbytes >= base.nbytes:
      return tokens
  return tokens.copy()
