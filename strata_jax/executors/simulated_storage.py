"""A page store of the simulation: which pages it has, and how long reads and writes take."""

import collections
from collections.abc import Sequence

from strata_jax.executors.look_up_keys import LookUpKeys
from strata_jax.executors.protocol import (
  LookUpDone,
  LookUpWork,
  PrefetchDone,
  PrefetchWork,
  SpillDone,
  SpillHanded,
  SpillWork,
  StorageEvent,
  StorageWork,
)
from strata_jax.page_keys import page_keys
from strata_jax.profile import Storage

_KNOWN_LOOK_UPS = 256  # whose keys are kept for the reads that follow


class SimulatedStorage:
  """Pages by key, without bytes. Reads queue behind reads, writes behind writes.

  A look-up takes the latency; a read or write takes it once and then its bytes at the rate. Pages
  can be found once they are durable. With a capacity the least recently used go.
  """

  def __init__(
    self, costs: Storage, *, page_bytes: float, page_size: int, capacity_pages: int | None = None
  ) -> None:
    self._costs = costs
    self._page_bytes = page_bytes
    self._page_size = page_size
    self._capacity_pages = capacity_pages
    self._durable_s: collections.OrderedDict[bytes, float] = collections.OrderedDict()
    self._keys = LookUpKeys(page_size, capacity=_KNOWN_LOOK_UPS)
    self._read_free_s = 0.0
    self._write_free_s = 0.0
    self.read_bytes = 0.0
    self.written_bytes = 0.0

  def __len__(self) -> int:
    """Pages in the store."""
    return len(self._durable_s)

  def restart(self) -> None:
    """Begins a new run, at time 0, with the pages that are there."""
    self._keys.clear()
    self._read_free_s = self._write_free_s = 0.0
    self.read_bytes = self.written_bytes = 0.0
    for key in self._durable_s:
      self._durable_s[key] = 0.0

  def start(self, work: StorageWork, now_s: float) -> Sequence[StorageEvent]:
    """The events of work that starts now."""
    if isinstance(work, LookUpWork):
      return (self._look_up(work, now_s),)
    if isinstance(work, PrefetchWork):
      return (self._prefetch(work, now_s),)
    return self._spill(work, now_s)

  def _look_up(self, work: LookUpWork, now_s: float) -> LookUpDone:
    found = 0
    for key in self._keys.of(work)[work.skip_pages :]:
      if self._durable_s.get(key, float("inf")) > now_s:
        break
      found += 1
    return LookUpDone(work.work_id, now_s + self._costs.latency_s, found)

  def _prefetch(self, work: PrefetchWork, now_s: float) -> PrefetchDone:
    keys = self._keys.of(work.look_up)[work.first_page :][: len(work.host_slots)]
    pages = 0
    for key in keys:
      if key not in self._durable_s:  # gone since
        break
      self._durable_s.move_to_end(key)
      pages += 1
    size = len(keys) * self._page_bytes
    start_s = max(now_s, self._read_free_s)
    self._read_free_s = start_s + size / self._costs.read_bytes_per_s
    self.read_bytes += size
    return PrefetchDone(work.work_id, self._read_free_s + self._costs.latency_s, pages)

  def _spill(self, work: SpillWork, now_s: float) -> tuple[SpillHanded, SpillDone]:
    keys = page_keys(work.parent_key, work.token_ids, self._page_size)
    new = [key for key in keys[work.skip_pages :] if key not in self._durable_s]
    size = len(new) * self._page_bytes
    start_s = max(now_s, self._write_free_s)
    self._write_free_s = start_s + size / self._costs.write_bytes_per_s
    self.written_bytes += size
    durable_s = self._write_free_s + self._costs.latency_s
    for key in new:
      self._durable_s[key] = durable_s
    if self._capacity_pages is not None:
      while len(self._durable_s) > self._capacity_pages:
        self._durable_s.popitem(last=False)
    handed = SpillHanded(work.work_id, self._write_free_s, keys[-1])
    return handed, SpillDone(work.work_id, durable_s)
