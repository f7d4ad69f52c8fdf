"""Pages of the device and host tiers: room, eviction, loads, backups. Knows no requests' phases."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from strata_jax.access_history import AccessHistory
from strata_jax.config import CacheConfig
from strata_jax.controller.results import ControllerStats
from strata_jax.executors.protocol import BackupDone, BackupWork, LoadDone, LoadWork
from strata_jax.page_allocator import PageAllocator
from strata_jax.radix_tree import DEVICE, HOST, HiRadixTree, Node


@dataclasses.dataclass(slots=True, eq=False)
class Transfer:
  """Pages under way into a tier. A split of one of its nodes adds the upper part to `nodes`."""

  transfer_id: int
  tier: int  # where the pages go
  nodes: list[Node]
  locks: list[tuple[Node, int]] = dataclasses.field(default_factory=list)  # (path's end, tier)
  is_prefetch: bool = False  # storage -> host


class CacheTiers:
  """The tree, the two pools, and what moves between them."""

  def __init__(self, cache: CacheConfig, fingerprint: str, stats: ControllerStats) -> None:
    self.page_size = cache.page_size
    self.write_policy = cache.write_policy if cache.host_pages else "none"
    selective = self.write_policy == "write_through_selective"
    self.threshold = cache.selective_threshold if selective else 1
    history = AccessHistory(cache.page_size, cache.access_count_entries) if selective else None
    self.tree = HiRadixTree(cache.page_size, fingerprint=fingerprint, history=history)
    self.device = PageAllocator(cache.device_pages)
    self.host = PageAllocator(cache.host_pages)
    self.stats = stats
    self.transfers: dict[int, Transfer] = {}
    self._next_transfer = 0
    self._due: dict[Node, None] = {}  # backups to be started
    self._evicting: Transfer | None = None  # write-back of what this step evicts
    self._evicting_slots: list[tuple[np.ndarray, np.ndarray]] = []  # (device, host)
    self.joins = True  # False: somebody keeps nodes by object, as a storage tier does
    # What a storage tier wants to know: pages came to the host; host pages are to be evicted.
    self.on_host: Callable[[Node], None] = lambda node: None
    self.must_spill: Callable[[Node], bool] = lambda node: False

  # -- device pages -------------------------------------------------------------------------------

  def fits(self, pages: int) -> bool:
    """Whether so many device pages are free or can be made so."""
    return pages <= self.device.free_pages + self.tree.pages[DEVICE].evictable

  def allocate(self, pages: int) -> np.ndarray:
    """Device slots, int32 [pages]; evicts the shortfall. The caller asked `fits`."""
    short = pages - self.device.free_pages
    while short > 0:
      node = self.tree.victim(DEVICE, short)
      assert node is not None, f"{short} evictable pages are missing"
      if self.write_policy == "write_back" and node.slots[HOST] is None:
        self._write_back(node)
      slots = self.tree.detach(node, DEVICE)
      self.device.free(slots)
      short -= len(slots)
      self.stats.evicted_device_pages += len(slots)
      if node.slots[HOST] is None and not node.storage:
        self.stats.dropped_pages += len(slots)
      self.tree.prune(node)
    return self.device.allocate(pages)

  # -- loads --------------------------------------------------------------------------------------

  def load(self, nodes: Sequence[Node], slots: np.ndarray, request_id: int) -> LoadWork:
    """Starts host -> device for nodes that follow each other on one path, into `slots`.

    The host slots, and the device slots with all that stands above, are locked until LoadDone.
    """
    transfer = self._start(DEVICE, list(nodes))
    host_slots = np.concatenate([node.slots[HOST] for node in nodes])
    at = 0
    for node in nodes:
      pages = len(node.tokens) // self.page_size
      self.tree.attach(node, DEVICE, slots[at : at + pages].copy(), transfer)
      at += pages
    for tier in (DEVICE, HOST):
      self._lock(transfer, nodes[-1], tier)
    tokens = at * self.page_size
    self.stats.loads += 1
    self.stats.loaded_tokens += tokens
    return LoadWork(
      transfer_id=transfer.transfer_id,
      request_id=request_id,
      node_ids=tuple(node.id for node in nodes),
      host_slots=host_slots,
      device_slots=slots,
      tokens=tokens,
    )

  def load_done(self, event: LoadDone) -> None:
    transfer = self._finish(event.transfer_id, DEVICE)
    for node in transfer.nodes:
      self.tree.arrived(node, DEVICE)
    self._unlock(transfer)
    if self.joins:
      self.tree.join(max(transfer.nodes, key=lambda node: node.end))

  # -- backups ------------------------------------------------------------------------------------

  def want_backup(self, node: Node) -> None:
    """After an access: notes a backup if the write policy says so."""
    if (
      node.slots[HOST] is None
      and not node.backup_due
      and not node.growing
      and node.accesses >= self.threshold
      and self.write_policy in ("write_through", "write_through_selective")
    ):
      node.backup_due = True
      self._due[node] = None

  def start_backups(self) -> tuple[BackupWork, ...]:
    """Starts what is due, and what this step's evictions write back."""
    works: list[BackupWork] = []
    if self._evicting is not None:
      works.append(self._backup_work(self._evicting, self._evicting_slots, evicts=True))
      self._evicting, self._evicting_slots = None, []
    due, self._due = self._due, {}
    for node in due:
      chain = self._unbacked_chain(node)
      transfer = self._start(HOST, [])
      slots = self._reserve_host(transfer, chain)
      if not slots:
        del self.transfers[transfer.transfer_id]
        continue
      for tier in (DEVICE, HOST):
        self._lock(transfer, chain[len(slots) - 1], tier)
      works.append(self._backup_work(transfer, slots, evicts=False))
    return tuple(works)

  def backup_done(self, event: BackupDone) -> None:
    """Nodes count as backed up only below backed-up parents: all before a hole, nothing after."""
    transfer = self._finish(event.transfer_id, HOST)
    if not event.ok:
      self.stats.failed_backups += 1
    self.arrive(transfer, lambda node: event.ok)

  def arrive(self, transfer: Transfer, is_good: Callable[[Node], bool]) -> None:
    """A transfer to the host is over: its nodes count, or lose their slots where it failed."""
    host_locks = [lock for lock in transfer.locks if lock[1] == HOST]
    for node, tier in transfer.locks:
      if tier == DEVICE:
        self.tree.unlock(node, DEVICE)
    dropped: list[Node] = []
    for node in sorted(transfer.nodes, key=lambda node: node.end):
      parent = node.parent
      assert parent is not None
      good = is_good(node)
      if good and (parent.parent is None or parent.ready(HOST)):
        self.tree.arrived(node, HOST)
        self.on_host(node)
      elif good and parent.slots[HOST] is not None:  # counts when its parent does
        later = parent.transfers[HOST]
        node.transfers[HOST] = later
        later.nodes.append(node)
        later.locks += host_locks
        host_locks = []
        self.tree.changed(node)  # it is read from storage no longer
      else:
        self.host.free(self.tree.detach(node, HOST))
        dropped.append(node)
    for node, tier in host_locks:
      self.tree.unlock(node, tier)
    for node in reversed(dropped):
      if node.slots[DEVICE] is None and not node.storage:
        self.stats.dropped_pages += len(node.tokens) // self.page_size
      if self.tree.nodes.get(node.id) is node:  # else it has gone with one below it
        self.tree.prune(node)

  # -- storage ------------------------------------------------------------------------------------

  def find_host_room(self, pages: int) -> int:
    """Makes room for up to `pages` host pages; for how many there is."""
    self._make_host_room(min(pages, self.host.free_pages + self.tree.pages[HOST].evictable))
    return min(pages, self.host.free_pages)

  def start_prefetch(self, node: Node) -> Transfer:
    """Gives a node host slots that are filled from storage; the path is locked until then."""
    transfer = self._start(HOST, [node])
    transfer.is_prefetch = True
    self.tree.attach(node, HOST, self.host.allocate(len(node.tokens) // self.page_size), transfer)
    self._lock(transfer, node, HOST)
    self.tree.touch(node)
    return transfer

  def finish_prefetch(self, transfer: Transfer, is_good: Callable[[Node], bool]) -> None:
    self.arrive(self._finish(transfer.transfer_id, HOST), is_good)

  def hold(self, node: Node) -> Transfer:
    """Locks the host slots of the path down to a node until `release`."""
    transfer = self._start(HOST, [])
    self._lock(transfer, node, HOST)
    return transfer

  def release(self, transfer: Transfer) -> None:
    self._unlock(self._finish(transfer.transfer_id, HOST))

  def cover(self, node: Node) -> None:
    """Storage has the node's pages; it counts as far as storage has all above."""
    parent = node.parent
    if parent is not None and (parent.parent is None or parent.storage) and not node.storage:
      node.storage = True
      self.tree.changed(node)

  def uncover(self, node: Node) -> None:
    """Storage lost the node's pages, so that it covers nothing below either."""
    pending = [node]
    while pending:
      step = pending.pop()
      if step.storage:
        step.storage = False
        self.tree.changed(step)
        pending.extend(step.children.values())

  def known_key(self, node: Node | None) -> tuple[int, bytes]:
    """The deepest position on the path down to a node (or root) whose page key is known."""
    while node is not None and node.storage_key is None:
      node = node.parent
    assert node is not None, "a root has its key from the start"
    assert node.storage_key is not None
    return node.end, node.storage_key

  def clear(self) -> None:
    """Forgets all pages. The caller made sure that none is in use."""
    assert not self.transfers
    self._due.clear()
    self.tree.clear()
    self.device = PageAllocator(self.device.capacity_pages)
    self.host = PageAllocator(self.host.capacity_pages)

  # -- inside -------------------------------------------------------------------------------------

  def _start(self, tier: int, nodes: list[Node]) -> Transfer:
    transfer = Transfer(self._next_transfer, tier, nodes)
    self._next_transfer += 1
    self.transfers[transfer.transfer_id] = transfer
    return transfer

  def _finish(self, transfer_id: int, tier: int) -> Transfer:
    transfer = self.transfers.get(transfer_id)
    if transfer is None or transfer.tier != tier:
      raise ValueError(f"expected the id of a transfer under way, got {transfer_id}")
    return self.transfers.pop(transfer_id)

  def _lock(self, transfer: Transfer, node: Node, tier: int) -> None:
    self.tree.lock(node, tier)
    transfer.locks.append((node, tier))

  def _unlock(self, transfer: Transfer) -> None:
    for node, tier in transfer.locks:
      self.tree.unlock(node, tier)

  def _unbacked_chain(self, node: Node) -> list[Node]:
    """The nodes of the path down to `node` that are on the device only, topmost first."""
    chain: list[Node] = []
    step = node
    while step.parent is not None and step.slots[HOST] is None:
      step.backup_due = False
      if step.growing:
        self.tree.end_growth(step)
      if step.ready(DEVICE):  # what is not there any more has left the end of the path
        chain.append(step)
      step = step.parent
    chain.reverse()
    return chain

  def _reserve_host(
    self, transfer: Transfer, chain: Sequence[Node]
  ) -> list[tuple[np.ndarray, np.ndarray]]:
    """Gives the chain host slots from its top on, as far as there is room: (device, host)."""
    slots: list[tuple[np.ndarray, np.ndarray]] = []
    for node in chain:
      parent = node.parent
      assert parent is not None
      pages = len(node.tokens) // self.page_size
      evicts = pages > self.host.free_pages
      if evicts:
        self.tree.lock(parent, HOST)  # not evicted for its own child
      found = not evicts or self._make_host_room(pages)
      if found:
        host_slots = self.host.allocate(pages)
        self.tree.attach(node, HOST, host_slots, transfer)
        transfer.nodes.append(node)
        slots.append((node.slots[DEVICE], host_slots))
      if evicts:
        self.tree.unlock(parent, HOST)
      if not found:
        self.stats.skipped_backups += 1
        break
    return slots

  def _make_host_room(self, pages: int) -> bool:
    short = pages - self.host.free_pages
    if short > self.tree.pages[HOST].evictable:
      return False
    while short > 0:
      node = self.tree.victim(HOST, short)
      if node is None:
        return False
      if self.must_spill(node):  # it is locked from now on
        continue
      slots = self.tree.detach(node, HOST)
      self.host.free(slots)
      short -= len(slots)
      self.stats.evicted_host_pages += len(slots)
      self.tree.prune(node)
    return True

  def _write_back(self, node: Node) -> None:
    """Backs up a node that is about to be evicted, its ancestors first."""
    transfer = self._evicting or self._start(HOST, [])
    chain = self._unbacked_chain(node)
    slots = self._reserve_host(transfer, chain)
    if slots:
      self._lock(transfer, chain[len(slots) - 1], HOST)
      self._evicting = transfer
      self._evicting_slots += slots
    elif self._evicting is None:
      del self.transfers[transfer.transfer_id]

  def _backup_work(
    self, transfer: Transfer, slots: list[tuple[np.ndarray, np.ndarray]], *, evicts: bool
  ) -> BackupWork:
    device_slots = np.concatenate([device for device, _ in slots] or [np.empty(0, np.int32)])
    host_slots = np.concatenate([host for _, host in slots] or [np.empty(0, np.int32)])
    tokens = len(host_slots) * self.page_size
    self.stats.backups += 1
    self.stats.backed_up_tokens += tokens
    return BackupWork(
      transfer_id=transfer.transfer_id,
      node_ids=tuple(node.id for node in transfer.nodes),
      device_slots=device_slots,
      host_slots=host_slots,
      tokens=tokens,
      evicts=evicts,
    )
