"""Spill: what of the host tier is written to storage, and how far each write got.

Written are host pages, as the write policy of the cache says, ancestors first, so that what storage
covers of a path has no holes. Slots are locked until the store has its own copy; a page counts as
stored once it is durable.
"""

import itertools

import numpy as np

from strata_jax.config import StorageConfig
from strata_jax.controller.tiers import CacheTiers, Transfer
from strata_jax.executors.protocol import SpillDone, SpillHanded, SpillWork
from strata_jax.radix_tree import HOST, Node

_CLEAN_FRACTION = 4  # write-back: a fourth of the host pool is kept free or stored already


class _Spill:
  """A write under way: the nodes of the path from position `start` down to `node`."""

  __slots__ = ("hold", "node", "pages", "start")

  def __init__(self, node: Node, start: int, pages: int, hold: Transfer) -> None:
    self.node = node
    self.start = start
    self.pages = pages
    self.hold: Transfer | None = hold  # until it is handed over

  def nodes(self) -> list[Node]:
    """As they are now: splits leave `node` the deepest."""
    return [node for node in self.node.path() if node.start >= self.start]


class Spiller:
  """Decides what is written. Ids of work come from `ids`."""

  def __init__(self, config: StorageConfig, tiers: CacheTiers, ids: "itertools.count[int]") -> None:
    self._config = config
    self._tiers = tiers
    self._ids = ids
    self._pages_in_flight = max(1, config.spill_tokens_in_flight // tiers.page_size)
    self._due: dict[Node, None] = {}
    self._started: list[SpillWork] = []
    self._spills: dict[int, _Spill] = {}
    self._spilling: set[Node] = set()
    self._handing_pages = 0
    self._refused_until_s = float("-inf")

  @property
  def is_handing(self) -> bool:
    """Whether host slots are locked for a write."""
    return bool(self._handing_pages or self._due)

  def on_host(self, node: Node) -> None:
    """A node's pages have come to the host."""
    if self._config.writes and self._tiers.write_policy in (
      "write_through",
      "write_through_selective",
    ):
      self._due[node] = None

  def must_spill(self, node: Node, now_s: float) -> bool:
    """Write-back: whether the node, about to be evicted, is written instead; it is locked then."""
    if (
      self._tiers.write_policy != "write_back"
      or not self._config.writes
      or now_s < self._refused_until_s
      or self._handing_pages >= self._pages_in_flight
    ):
      return False
    chain = self._unstored(node)
    if not chain:
      return False
    self._start(chain, cut=False)  # the node itself has to be among them
    return True

  def work(self, now_s: float) -> list[SpillWork]:
    """What is to be started now."""
    if now_s < self._refused_until_s:
      self._tiers.stats.skipped_spills += len(self._due)
      self._due.clear()
    if self._tiers.write_policy == "write_back":
      self._clean(now_s)
    while self._due and self._handing_pages < self._pages_in_flight:
      node = next(iter(self._due))
      chain = self._unstored(node)
      if not chain or self._start(chain):
        self._due.pop(node, None)
    started, self._started = self._started, []
    return started

  def handed(self, event: SpillHanded) -> None:
    """The store has its own copy: the slots may be used again."""
    spill = self._spills[event.work_id]
    if spill.hold is not None:
      self._tiers.release(spill.hold)
      spill.hold = None
      self._handing_pages -= spill.pages
    spill.node.storage_key = event.last_key
    self._tiers.stats.handed_over_pages += spill.pages

  def done(self, event: SpillDone, now_s: float) -> None:
    """The pages are durable, or the store refused them."""
    spill = self._spills.pop(event.work_id)
    if spill.hold is not None:
      self._tiers.release(spill.hold)
      self._handing_pages -= spill.pages
    nodes = spill.nodes()
    self._spilling.difference_update(nodes)
    self._spilling.discard(spill.node)
    if not event.ok:
      self._tiers.stats.failed_spills += 1
      self._refused_until_s = now_s + self._config.retry_s
      return
    self._tiers.stats.durable_pages += spill.pages
    for node in nodes:
      if self._tiers.tree.nodes.get(node.id) is node:
        self._tiers.cover(node)

  def progress(self, node: Node) -> str:
    """How far the backup of a node got: "", "in_host", "handed_over" or "durable"."""
    if node.storage:
      return "durable"
    for spill in self._spills.values():
      if spill.hold is None and node in spill.nodes():
        return "handed_over"
    return "in_host" if node.ready(HOST) else ""

  def clear(self) -> None:
    self._due.clear()

  # -- inside -------------------------------------------------------------------------------------

  def _unstored(self, node: Node) -> list[Node]:
    """The nodes down to `node` that are to be written, topmost first; they lead on from others."""
    chain: list[Node] = []
    step = node
    while step.parent is not None and not step.storage:
      if step in self._spilling:
        break  # what is under way covers the rest
      if not step.ready(HOST) or self._tiers.tree.nodes.get(step.id) is not step:
        return []
      chain.append(step)
      step = step.parent
    chain.reverse()
    return chain

  def _start(self, chain: list[Node], *, cut: bool = True) -> bool:
    """Starts to write nodes, topmost first, all or as many as fit; whether that was all."""
    tiers, page = self._tiers, self._tiers.page_size
    room = self._pages_in_flight - self._handing_pages
    taken: list[Node] = []
    pages = 0
    for node in chain:
      count = len(node.tokens) // page
      if cut and taken and pages + count > room:
        break
      taken.append(node)
      pages += count
    whole = len(taken) == len(chain)
    first = taken[0]
    base, key = tiers.known_key(first.parent)
    above = [node for node in first.path() if base < node.end <= first.start]
    work_id = next(self._ids)
    self._started.append(
      SpillWork(
        work_id=work_id,
        parent_key=key,
        token_ids=np.concatenate([node.tokens for node in (*above, *taken)]),
        skip_pages=(first.start - base) // page,
        host_slots=np.concatenate([node.slots[HOST] for node in taken]),
      )
    )
    self._spills[work_id] = _Spill(taken[-1], first.start, pages, tiers.hold(taken[-1]))
    self._spilling.update(taken)
    self._handing_pages += pages
    tiers.stats.spills += 1
    tiers.stats.spilled_pages += pages
    return whole

  def _clean(self, now_s: float) -> None:
    """Write-back: writes what would be evicted next before its room is needed."""
    tiers = self._tiers
    keep = tiers.host.capacity_pages // _CLEAN_FRACTION
    while tiers.host.free_pages < keep:
      node = tiers.tree.victim(HOST, keep)
      if node is None:
        return
      if not self.must_spill(node, now_s):
        tiers.tree.requeue(node, HOST)
        return
