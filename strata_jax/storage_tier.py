"""The storage tier as metadata: what is read from a store for whom, and what is written to it.

Deterministic and without I/O: it turns what happens in the cache into look-ups, reads and writes
for an executor, and takes their completions in. See `controller/prefetching.py` and
`controller/spilling.py` for the two directions.
"""

import itertools

from strata_jax.config import StorageConfig
from strata_jax.controller.prefetching import Prefetcher
from strata_jax.controller.request_state import RequestState
from strata_jax.controller.spilling import Spiller
from strata_jax.controller.tiers import CacheTiers
from strata_jax.executors.protocol import (
  LookUpDone,
  PrefetchDone,
  SpillDone,
  SpillHanded,
  StorageEvent,
  StorageWork,
)
from strata_jax.radix_tree import Node
from strata_jax.scheduler.views import PrefetchView, RequestView


class StorageTier:
  """Belongs to one CacheController, which calls it as things happen."""

  def __init__(self, config: StorageConfig, tiers: CacheTiers) -> None:
    ids = itertools.count()
    self._prefetcher = Prefetcher(config, tiers, ids)
    self._spiller = Spiller(config, tiers, ids)
    self._now_s = 0.0
    tiers.on_host = self._spiller.on_host
    tiers.must_spill = self._must_spill
    tiers.joins = False  # spills keep nodes by object

  @property
  def is_busy(self) -> bool:
    """Whether something is under way that locks pages or will bring some."""
    return self._prefetcher.is_busy or self._spiller.is_handing

  def queued(self, state: RequestState, now_s: float) -> None:
    """A request starts to wait."""
    self._now_s = now_s
    self._prefetcher.queued(state, now_s)

  def reads_again(self, state: RequestState, view: RequestView) -> bool:
    """Looks up anew what a waiting request would hit, if it has gone to storage since it came."""
    if not state.reads_storage or view.prefetch or not self._prefetcher.is_worth_reading(view):
      return False
    self._prefetcher.queued(state, self._now_s)
    return state.prefetch is not None

  def left(self, state: RequestState) -> None:
    """A request waits no longer, or is to wait no longer for storage."""
    self._prefetcher.left(state)

  def view(self, state: RequestState) -> PrefetchView | None:
    """How far the prefetch of a waiting request is."""
    return self._prefetcher.view(state)

  def work(self, now_s: float) -> tuple[StorageWork, ...]:
    """What an executor is to start now."""
    self._now_s = now_s
    return (*self._prefetcher.work(), *self._spiller.work(now_s))

  def complete(self, event: StorageEvent, now_s: float) -> None:
    """Takes an event in."""
    self._now_s = now_s
    if isinstance(event, LookUpDone):
      self._prefetcher.looked_up(event)
    elif isinstance(event, PrefetchDone):
      self._prefetcher.done(event)
    elif isinstance(event, SpillHanded):
      self._spiller.handed(event)
    elif isinstance(event, SpillDone):
      self._spiller.done(event, now_s)

  def progress(self, node: Node) -> str:
    """How far the backup of a node got: "", "in_host", "handed_over" or "durable"."""
    return self._spiller.progress(node)

  def clear(self) -> None:
    """Forgets what was to be started. What is under way ends on its own."""
    self._prefetcher.clear()
    self._spiller.clear()

  def _must_spill(self, node: Node) -> bool:
    return self._spiller.must_spill(node, self._now_s)
