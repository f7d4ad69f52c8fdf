"""The controller harness with a storage tier whose events, too, come when the test says so.

The store is a dict from page key to the tokens of the page. A read fills host pages only when it is
done, a write reads them only when it is handed over: what is unlocked too early is found.
"""

import numpy as np

from strata_jax.cache_controller import CacheController
from strata_jax.config import StorageConfig
from strata_jax.executors.protocol import (
  LookUpDone,
  LookUpWork,
  PrefetchDone,
  PrefetchWork,
  SpillDone,
  SpillHanded,
  SpillWork,
)
from strata_jax.page_keys import page_keys
from tests.controller_harness import POISON, Harness


class StorageHarness(Harness):
  """`auto`: the storage's work is done as soon as it is asked for by `storage`."""

  def __init__(
    self,
    *,
    store: dict[bytes, np.ndarray] | None = None,
    storage: dict | None = None,
    fingerprint: str = "model",
    **options,
  ) -> None:
    super().__init__(**options)
    wanted = {"min_prefetch_tokens": self.page_size, "read_tokens": 4 * self.page_size}
    self.controller = CacheController(
      self.controller.cache,
      self.controller.serving,
      fingerprint=fingerprint,
      context_tokens=self.controller.context_tokens,
      storage=StorageConfig(**(wanted | (storage or {}))),
    )
    self.store = {} if store is None else store
    self.look_ups: dict[int, LookUpWork] = {}
    self.reads: dict[int, PrefetchWork] = {}
    self.spills: dict[int, SpillWork] = {}
    self.handed: dict[int, dict[bytes, np.ndarray]] = {}
    self.now_s = 0.0

  # What the executor would do.

  def start(self) -> None:
    """Takes new work of the storage tier over."""
    for work in self.controller.storage_work(self.now_s):
      if isinstance(work, LookUpWork):
        self.look_ups[work.work_id] = work
        continue
      slots = work.host_slots.tolist()
      assert len(set(slots)) == len(slots)
      if isinstance(work, PrefetchWork):
        self.host[work.host_slots] = POISON
        self.reads[work.work_id] = work
      else:
        self.spills[work.work_id] = work
    self.check()

  def look_up_done(self, work_id: int | None = None, *, pages: int | None = None) -> None:
    work = self._take(self.look_ups, work_id)
    if pages is None:
      pages = 0
      for key in self._keys(work)[work.skip_pages :]:
        if key not in self.store:
          break
        pages += 1
    self.controller.complete(LookUpDone(work.work_id, self.now_s, pages), self.now_s)
    self.check()

  def read_done(self, work_id: int | None = None, *, pages: int | None = None) -> None:
    """Brings pages in: all that are there in a row, or so many."""
    work = self._take(self.reads, work_id)
    keys = self._keys(work.look_up)[work.first_page :][: len(work.host_slots)]
    right = 0
    for key, slot in zip(keys, work.host_slots, strict=True):
      if key not in self.store or right == pages:
        break
      self.host[slot] = self.store[key]
      right += 1
    self.controller.complete(PrefetchDone(work.work_id, self.now_s, right), self.now_s)
    self.check()

  def spill_handed(self, work_id: int | None = None) -> int:
    work = self._take(self.spills, work_id)
    keys = self._keys(work)
    pages = self._read(self.host, work.host_slots)
    expected = work.token_ids.reshape(-1, self.page_size)[work.skip_pages :]
    np.testing.assert_array_equal(pages, expected)
    self.handed[work.work_id] = dict(zip(keys[work.skip_pages :], pages, strict=True))
    self.controller.complete(SpillHanded(work.work_id, self.now_s, keys[-1]), self.now_s)
    self.check()
    return work.work_id

  def spill_done(self, work_id: int | None = None, *, ok: bool = True) -> None:
    work_id = next(iter(self.handed)) if work_id is None else work_id
    pages = self.handed.pop(work_id)
    if ok:
      self.store.update(pages)
    self.controller.complete(SpillDone(work_id, self.now_s, ok), self.now_s)
    self.check()

  def settle(self) -> None:
    """Lets all of the storage tier's work be done, and what follows from it."""
    self.start()
    while self.look_ups or self.reads or self.spills or self.handed:
      while self.look_ups:
        self.look_up_done()
      while self.reads:
        self.read_done()
      while self.spills:
        self.spill_handed()
      while self.handed:
        self.spill_done()
      self.start()

  def run(self, prompt, outputs: int = 1, **fields) -> int:
    request_id = self.add(prompt, outputs, **fields)
    self.settle()
    applied = self.prefill(request_id)
    assert not applied.stale
    self.step_done()
    for _ in range(outputs - 1):
      self.view()
      self.apply(decode=(request_id,))
      self.step_done()
    self.finish(request_id)
    self.flush()
    self.transfers_done()
    self.settle()
    return request_id

  # Looking.

  def prefetch(self, request_id: int):
    return self.waiting(request_id).prefetch

  def stored(self, prompt: np.ndarray) -> int:
    """Tokens of a prompt that the tree says storage has, in a row."""
    tokens = 0
    match = self.controller.tree.match(prompt)
    for node in match.nodes:
      if not node.storage:
        break
      tokens = min(node.end, match.tokens)
    return tokens

  def all_hits(self, request_id: int) -> tuple[int, int, int]:
    """Device, host and storage hits at its first admission."""
    return (*self.hits(request_id), self.admissions[request_id][0].storage_hit_tokens)

  def _keys(self, work) -> list[bytes]:
    return page_keys(work.parent_key, work.token_ids, self.page_size)

  @staticmethod
  def _take(works: dict, work_id: int | None):
    return works.pop(next(iter(works)) if work_id is None else work_id)
