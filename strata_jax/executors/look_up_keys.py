"""The page keys of look-ups, kept for the reads that follow them."""

import collections
import threading

from strata_jax.executors.protocol import LookUpWork
from strata_jax.page_keys import page_keys


class LookUpKeys:
  """Keys of the look-ups used last; those of older ones are made again when they are asked for."""

  def __init__(self, page_size: int, *, capacity: int) -> None:
    """Keeps the keys of `capacity` look-ups over pages of `page_size` tokens."""
    self._page_size = page_size
    self._capacity = capacity
    self._lock = threading.Lock()
    # By identity, with the look-up itself: ids of work begin anew with every controller.
    self._kept: collections.OrderedDict[int, tuple[LookUpWork, list[bytes]]] = (
      collections.OrderedDict()
    )

  def __len__(self) -> int:
    """Look-ups whose keys are kept."""
    return len(self._kept)

  def of(self, work: LookUpWork) -> list[bytes]:
    """The keys of all pages of a look-up's tokens. Safe to use from several threads."""
    with self._lock:
      known = self._kept.get(id(work))
      if known is not None:
        self._kept.move_to_end(id(work))
        return known[1]
    keys = page_keys(work.parent_key, work.token_ids, self._page_size)
    with self._lock:
      self._kept[id(work)] = (work, keys)
      if len(self._kept) > self._capacity:
        self._kept.popitem(last=False)
    return keys

  def clear(self) -> None:
    """Forgets all."""
    with self._lock:
      self._kept.clear()
