"""Slots of one tier's page pool."""

import numpy as np


class PageAllocator:
  """Hands out the slots `0 .. capacity_pages - 1`, each to one owner at a time.

  Freed slots are used again first, the last freed one first; memory grows with the slots ever
  handed out, not with the capacity. Deterministic.
  """

  def __init__(self, capacity_pages: int) -> None:
    if capacity_pages < 0:
      raise ValueError(f"capacity_pages: expected an integer >= 0, got {capacity_pages!r}")
    self.capacity_pages = capacity_pages
    self._unused = 0  # slots from here on were never handed out
    self._freed = np.empty(256, np.int32)  # a stack of returned slots
    self._freed_count = 0

  @property
  def free_pages(self) -> int:
    return self._freed_count + self.capacity_pages - self._unused

  @property
  def used_pages(self) -> int:
    return self._unused - self._freed_count

  def allocate(self, pages: int) -> np.ndarray:
    """Takes `pages` slots: int32 [pages]. Raises MemoryError, taking none, if there are fewer."""
    if pages > self.free_pages:
      raise MemoryError(f"expected at most {self.free_pages} free pages, got a call for {pages}")
    reused = min(pages, self._freed_count)
    fresh = pages - reused
    self._freed_count -= reused
    if not fresh:
      return self._freed[self._freed_count : self._freed_count + reused].copy()
    slots = np.empty(pages, np.int32)
    slots[:reused] = self._freed[self._freed_count : self._freed_count + reused]
    slots[reused:] = np.arange(self._unused, self._unused + fresh, dtype=np.int32)
    self._unused += fresh
    return slots

  def free(self, slots: np.ndarray) -> None:
    """Gives slots back. Raises ValueError when more come back than were handed out."""
    count = self._freed_count + len(slots)
    if count > self._unused:
      raise ValueError(f"expected at most {self.used_pages} slots in use, got {len(slots)} back")
    if count > len(self._freed):
      grown = np.empty(max(count, 2 * len(self._freed)), np.int32)
      grown[: self._freed_count] = self._freed[: self._freed_count]
      self._freed = grown
    self._freed[self._freed_count : count] = slots
    self._freed_count = count

  def used_mask(self) -> np.ndarray:
    """Which slots are in use, for checks: bool [capacity_pages]."""
    mask = np.zeros(self.capacity_pages, bool)
    mask[: self._unused] = True
    mask[self._freed[: self._freed_count]] = False
    return mask
