"""HiRadixTree: which tokens are cached, and where, as a radix tree over whole pages.

The tree knows tokens, slots, locks and recency. It copies no KV and owns no pool: slots come from
the caller and go back to the caller. It works without a controller, with slots of a
`page_allocator.PageAllocator` for instance:

  tree = HiRadixTree(page_size=16)
  inserted = tree.insert(tokens, allocator.allocate(pages))
  match = tree.match(tokens)          # match.tokens, match.nodes, match.nodes[0].state
  for slots in tree.evict(DEVICE, pages=10):
    allocator.free(slots)
"""

import dataclasses
import heapq
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from strata_jax.access_history import AccessHistory
from strata_jax.page_keys import root_key
from strata_jax.radix_node import DEVICE, HOST, TIERS, Node
from strata_jax.token_arrays import as_tokens, common_prefix, keep

__all__ = ["DEVICE", "HOST", "HiRadixTree", "Inserted", "Match", "Node"]


class Match(NamedTuple):
  """The longest prefix in the tree, in whole pages; the last node may be matched in part."""

  nodes: tuple[Node, ...]
  tokens: int

  def held_tokens(self, tier: int) -> int:
    """Tokens of the unbroken prefix whose bytes the tier has."""
    held = 0
    for node in self.nodes:
      if not node.ready(tier):
        break
      held = min(node.end, self.tokens)
    return held


class Inserted(NamedTuple):
  """The path that covers the inserted tokens exactly; slots that it did not take."""

  nodes: tuple[Node, ...]
  duplicate_slots: np.ndarray  # int32 [pages that the tree had already]


@dataclasses.dataclass(slots=True)
class TierPages:
  """Pages that nodes hold in one tier."""

  held: int = 0
  evictable: int = 0
  in_transfer: int = 0  # being filled; neither evictable nor protected

  @property
  def protected(self) -> int:
    return self.held - self.evictable - self.in_transfer


class HiRadixTree:
  """A radix tree per namespace (salt, adapter) over pages of `page_size` tokens.

  `fingerprint` names model and layout in the page keys. With a `history`, access counts of nodes
  that leave the tree are remembered there.
  """

  def __init__(
    self, page_size: int, *, fingerprint: str = "", history: AccessHistory | None = None
  ) -> None:
    if page_size < 1:
      raise ValueError(f"page_size: expected an integer >= 1, got {page_size!r}")
    self.page_size = page_size
    self.fingerprint = fingerprint
    self.history = history
    self.nodes: dict[int, Node] = {}  # all but the roots
    self.pages = (TierPages(), TierPages())  # by tier
    self.dirty_waiters: set[Any] = set()  # whose path changed; emptied by the tree's user
    self._roots: dict[tuple[str, str], Node] = {}
    self._next_id = 0
    self._next_order = 0
    self._clock = 0
    self._queues: tuple[list, list] = ([], [])  # heaps of (used, order, node), lazily corrected

  # -- reading ------------------------------------------------------------------------------------

  def root(self, salt: str = "", adapter: str = "") -> Node:
    """The root of a namespace, made when it is new. No salt is a namespace of its own."""
    node = self._roots.get((salt, adapter))
    if node is None:
      node = Node(-1, 0, None, np.empty(0, np.int32), 0)
      key = root_key(self.fingerprint, salt, adapter)
      node.prefix_hash = int.from_bytes(key[:8], "little")
      node.storage_key = key
      self._roots[(salt, adapter)] = node
    return node

  def match(self, tokens: Any, *, salt: str = "", adapter: str = "") -> Match:
    """The longest prefix of `tokens` in the tree. Changes nothing."""
    tokens = as_tokens(tokens)
    node = self._roots.get((salt, adapter))
    end = len(tokens) // self.page_size * self.page_size
    position = 0
    path: list[Node] = []
    while node is not None and position < end:
      node = node.children.get(self.page_key(tokens, position))
      if node is None:
        break
      shared = self._shared(node, tokens, position, end)
      path.append(node)
      position += shared
      if shared < len(node.tokens):
        break
    return Match(tuple(path), position)

  def roots(self) -> Iterator[Node]:
    """The roots of all namespaces in use."""
    return iter(self._roots.values())

  def page_key(self, tokens: np.ndarray, position: int) -> Any:
    """The key of the child whose first page is the one of `tokens` at `position`."""
    if self.page_size == 1:
      return int(tokens[position])
    return tokens[position : position + self.page_size].tobytes()

  # -- growing ------------------------------------------------------------------------------------

  def insert(
    self,
    tokens: Any,
    slots: np.ndarray,
    *,
    tier: int = DEVICE,
    salt: str = "",
    adapter: str = "",
    below: Node | None = None,
  ) -> Inserted:
    """Puts whole pages with their slots into a tier, below a node's end or the root.

    `slots`: int32 [whole pages of tokens]. Where the tier has pages already those stay, and the
    given ones come back as duplicates. A use of the whole path; counts one access of each node.
    Tokens are copied, unless they come as a read-only array: nobody may change those later.
    """
    tokens = as_tokens(tokens)
    pages = len(tokens) // self.page_size
    if len(slots) != pages:
      raise ValueError(f"slots: expected {pages} for {len(tokens)} tokens, got {len(slots)}")
    top = self.root(salt, adapter) if below is None else below
    path = self.extend(top, tokens, 0, pages * self.page_size)
    duplicates: list[np.ndarray] = []
    base = top.end
    for node in path:
      own = slots[(node.start - base) // self.page_size : (node.end - base) // self.page_size]
      if node.slots[tier] is None:
        self.attach(node, tier, own)
      else:
        duplicates.append(own)
      node.accesses += 1
    if path:
      self.touch(path[-1])
    return Inserted(tuple(path), np.concatenate(duplicates) if duplicates else slots[:0])

  def extend(self, node: Node, tokens: np.ndarray, start: int, end: int) -> list[Node]:
    """Makes the path below `node` cover `tokens[start:end]` (whole pages) exactly; returns it.

    Splits where the path leaves a node, adds one node without slots for what is missing. That
    node keeps a view of `tokens` until slots are attached.
    """
    path: list[Node] = []
    while start < end:
      key = self.page_key(tokens, start)
      child = node.children.get(key)
      if child is None:
        child = Node(
          self._next_id, self._next_order, node, tokens[start:end], node.end + end - start
        )
        self._next_id += 1
        self._next_order += 1
        self.nodes[child.id] = child
        node.children[key] = child
      else:
        shared = self._shared(child, tokens, start, end)
        if shared < len(child.tokens):
          child = self.split(child, shared)
      path.append(child)
      start += len(child.tokens)
      node = child
    return path

  def split(self, node: Node, tokens: int) -> Node:
    """Cuts a node after its first `tokens` (whole pages, not all). Returns the upper part.

    The upper part takes over the id; the object `node` goes on as the lower part, so that whoever
    holds the deepest node of a path still does.
    """
    if not 0 < tokens < len(node.tokens) or tokens % self.page_size:
      raise ValueError(f"expected whole pages inside {node}, got a split after {tokens} tokens")
    parent = node.parent
    assert parent is not None
    pages = tokens // self.page_size
    upper = Node(node.id, self._next_order, parent, node.tokens[:tokens], node.start + tokens)
    self._next_order += 1
    node.id = self._next_id
    self._next_id += 1
    self.nodes[upper.id] = upper
    self.nodes[node.id] = node
    parent.children[self.page_key(upper.tokens, 0)] = upper
    node.tokens = node.tokens[tokens:]
    node.parent = upper
    upper.children[self.page_key(node.tokens, 0)] = node
    for tier in TIERS:
      slots = node.slots[tier]
      if slots is not None:
        upper.slots[tier] = slots[:pages]
        node.slots[tier] = slots[pages:]
        upper.holders[tier] = 1
        transfer = node.transfers[tier]
        if transfer is not None:
          upper.transfers[tier] = transfer
          transfer.nodes.append(upper)
      upper.locks[tier] = node.locks[tier]
    upper.storage = node.storage
    upper.producers = dict(node.producers)
    upper.waiters = set(node.waiters)
    upper.accesses = node.accesses
    upper.used = node.used
    if node.growing:  # only the lower part goes on as a view of its request's buffers
      upper.tokens = upper.tokens.copy()
      upper.slots[DEVICE] = upper.slots[DEVICE].copy()
    upper.backup_due = node.backup_due
    self.changed(node)
    return upper

  def join(self, node: Node) -> Node:
    """Undoes splits on the path down to a node, where nothing tells two neighbours apart any more.

    Every eviction that ends inside a node splits it. Without joins the path of a context that is
    evicted and loaded again and again would break up into single pages. The lower object of two
    goes on, with the id of the upper one. Equal locks, waiters and producers say that nobody holds
    the upper object. To be called where nobody holds node ids either. Runs are the same with and
    without, as long as the host has room; what it evicts is backed up anew in fewer, larger pieces.

    Returns:
      The topmost node of the path.
    """
    while True:
      upper = node.parent
      assert upper is not None
      if upper.parent is None:
        return node
      if self._alike(upper, node):
        self._join(upper, node)
      else:
        node = upper

  def attach(self, node: Node, tier: int, slots: np.ndarray, transfer: Any = None) -> None:
    """Gives a node its slots in a tier, int32 [pages]; with a transfer they are being filled.

    The first slots make the node's tokens its own: until then they may be a view of a prompt.
    They stay one if it is read-only and not much larger than the node.
    """
    if len(slots) * self.page_size != len(node.tokens):
      raise ValueError(f"expected {len(node.tokens) // self.page_size} slots, got {len(slots)}")
    parent = node.parent
    assert parent is not None
    assert node.slots[tier] is None
    if node.slots[DEVICE] is None and node.slots[HOST] is None:
      node.tokens = keep(node.tokens)
    node.slots[tier] = slots
    parent.holders[tier] += 1
    pages = self.pages[tier]
    pages.held += len(slots)
    if transfer is not None:
      node.transfers[tier] = transfer
      pages.in_transfer += len(slots)
    elif not node.locks[tier]:
      pages.evictable += len(slots)
      self._queue(node, tier)
    self.changed(node)

  def arrived(self, node: Node, tier: int) -> None:
    """The transfer into the node's slots is over: the tier has the bytes."""
    node.transfers[tier] = None
    count = len(node.slots[tier])
    self.pages[tier].in_transfer -= count
    if not node.locks[tier]:
      self.pages[tier].evictable += count
      self._queue(node, tier)
    self.changed(node)

  def grow(self, node: Node, tokens: np.ndarray, slots: np.ndarray) -> None:
    """Replaces a locked device leaf's tokens and slots by longer ones that begin with them.

    Views are kept as such until `end_growth`.
    """
    node.growing = True
    self.pages[DEVICE].held += len(slots) - len(node.slots[DEVICE])
    node.end += len(tokens) - len(node.tokens)
    node.tokens = tokens
    node.slots[DEVICE] = slots
    node.prefix_hash = node.storage_key = None
    self.changed(node)

  def end_growth(self, node: Node) -> None:
    """Makes a growing node an ordinary one, which owns its tokens and slots."""
    node.growing = False
    node.tokens = node.tokens.copy()
    node.slots[DEVICE] = node.slots[DEVICE].copy()

  # -- shrinking ----------------------------------------------------------------------------------

  def detach(self, node: Node, tier: int) -> np.ndarray:
    """Takes a node's slots in a tier away and returns them. The node itself stays."""
    slots = node.slots[tier]
    parent = node.parent
    assert slots is not None
    assert parent is not None
    pages = self.pages[tier]
    pages.held -= len(slots)
    if node.transfers[tier] is not None:
      node.transfers[tier] = None
      pages.in_transfer -= len(slots)
    elif not node.locks[tier]:
      pages.evictable -= len(slots)
    node.slots[tier] = None
    parent.holders[tier] -= 1
    self._queue(parent, tier)
    self.changed(node)
    return slots

  def prune(self, node: Node) -> None:
    """Removes the node if it is bare, then its ancestors as far as they are."""
    while node.is_bare():
      parent = node.parent
      if parent is None:
        for name, root in self._roots.items():
          if root is node:
            del self._roots[name]
            break
        return
      self._remember(node)
      del parent.children[self.page_key(node.tokens, 0)]
      del self.nodes[node.id]
      node = parent

  def victim(self, tier: int, pages: int) -> Node | None:
    """The least recently used evictable leaf of a tier, cut down to at most `pages` pages.

    Leaf: no child has slots in the tier. None when nothing is evictable. The caller detaches it.
    """
    queue = self._queues[tier]
    while queue:
      used, _, node = heapq.heappop(queue)
      node.queued[tier] = False
      if not self._is_leaf(node, tier):
        continue
      if node.used != used:
        self._queue(node, tier)
        continue
      extra = len(node.slots[tier]) - pages
      if extra > 0:
        self.split(node, extra * self.page_size)
      return node
    return None

  def evict(self, tier: int, pages: int) -> Iterator[np.ndarray]:
    """Frees up to `pages` pages, least recently used leaves first; yields their slots."""
    while pages > 0:
      node = self.victim(tier, pages)
      if node is None:
        return
      slots = self.detach(node, tier)
      pages -= len(slots)
      self.prune(node)
      yield slots

  def clear(self) -> None:
    """Forgets everything but the ids. The caller makes sure that nothing is in use."""
    self.nodes.clear()
    self._roots.clear()
    for tier in TIERS:
      self.pages[tier].held = self.pages[tier].evictable = self.pages[tier].in_transfer = 0
      self._queues[tier].clear()
    if self.history is not None:
      self.history.clear()

  # -- use ----------------------------------------------------------------------------------------

  def lock(self, node: Node, tier: int) -> None:
    """Keeps the slots of the path down to `node` from being evicted; counted."""
    step: Node | None = node
    while step is not None:
      locks = step.locks
      locks[tier] += 1
      if locks[tier] == 1:
        self._locked(step, tier)
      step = step.parent

  def lock_below(self, node: Node, tier: int) -> None:
    """As `lock`, for a node whose parent the caller holds locked already."""
    node.locks[tier] += 1
    if node.locks[tier] == 1:
      self._locked(node, tier)

  def unlock(self, node: Node, tier: int) -> None:
    """Takes back one `lock` of the path down to `node`."""
    step: Node | None = node
    while step is not None:
      locks = step.locks
      count = locks[tier]
      assert count > 0, f"unlock of {step}, which is not locked"
      locks[tier] = count - 1
      if count == 1 and step.slots[tier] is not None:
        if step.transfers[tier] is None:
          self.pages[tier].evictable += len(step.slots[tier])
          self._queue(step, tier)
        if tier == DEVICE:
          self.changed(step)
      step = step.parent

  def touch(self, node: Node) -> None:
    """Marks the path down to `node` as used now."""
    clock = self._clock = self._clock + 1
    step: Node | None = node
    while step is not None:
      step.used = clock
      step = step.parent

  def requeue(self, node: Node, tier: int) -> None:
    """Takes back what `victim` gave, unused."""
    self._queue(node, tier)

  def changed(self, node: Node) -> None:
    """The node's span is no longer what it was: so are the paths of those who wait on it."""
    node.span = None
    if node.waiters:
      self.dirty_waiters |= node.waiters

  def known_accesses(self, node: Node) -> np.ndarray:
    """What the history knows of the node's pages, never rising: uint8 [pages]."""
    assert self.history is not None
    return self.history.lookup(self._page_hashes(node))

  # -- inside -------------------------------------------------------------------------------------

  def _shared(self, node: Node, tokens: np.ndarray, start: int, end: int) -> int:
    """Tokens that the node shares with `tokens[start:end]`, in whole pages."""
    length = min(len(node.tokens), end - start)
    shared = common_prefix(node.tokens[:length], tokens[start : start + length])
    return shared - shared % self.page_size

  def _alike(self, upper: Node, node: Node) -> bool:
    """Whether a node and its parent could be one."""
    return (
      len(upper.children) == 1
      and upper.used == node.used
      and upper.accesses == node.accesses
      and upper.locks == node.locks
      and all((upper.slots[tier] is None) == (node.slots[tier] is None) for tier in TIERS)
      and upper.transfers == node.transfers == [None, None]
      and upper.storage == node.storage
      and not (upper.growing or node.growing or upper.backup_due or node.backup_due)
      and not (upper.producers or node.producers)
      and upper.waiters == node.waiters
    )

  def _join(self, upper: Node, node: Node) -> None:
    parent = upper.parent
    assert parent is not None
    parent.children[self.page_key(upper.tokens, 0)] = node
    node.parent = parent
    node.tokens = np.concatenate([upper.tokens, node.tokens])
    for tier in TIERS:
      if node.slots[tier] is not None:
        node.slots[tier] = np.concatenate([upper.slots[tier], node.slots[tier]])
      upper.slots[tier] = None  # it may stand in the queue
    del self.nodes[node.id]
    node.id = upper.id
    self.nodes[node.id] = node
    self.changed(node)

  def _locked(self, node: Node, tier: int) -> None:
    """The node has its first lock in the tier."""
    slots = node.slots[tier]
    if slots is not None:
      if node.transfers[tier] is None:
        self.pages[tier].evictable -= len(slots)
      if tier == DEVICE:
        self.changed(node)

  def _is_leaf(self, node: Node, tier: int) -> bool:
    return (
      node.slots[tier] is not None
      and node.transfers[tier] is None
      and not node.locks[tier]
      and not node.holders[tier]
    )

  def _queue(self, node: Node, tier: int) -> None:
    """Puts an evictable leaf into the LRU queue unless it stands there (maybe too early)."""
    if not node.queued[tier] and self._is_leaf(node, tier):
      node.queued[tier] = True
      heapq.heappush(self._queues[tier], (node.used, node.order, node))

  def _page_hashes(self, node: Node) -> np.ndarray:
    assert self.history is not None
    unhashed = [node]  # upwards to the first node below a known hash
    above = node.parent
    while above is not None and above.prefix_hash is None:
      unhashed.append(above)
      above = above.parent
    assert above is not None, "a root has its hash from the start"
    known = above.prefix_hash
    hashes = np.empty(0, np.uint64)
    for step in reversed(unhashed):
      hashes = self.history.page_hashes(known, step.start, step.tokens)
      known = step.prefix_hash = int(hashes[-1])
    return hashes

  def _remember(self, node: Node) -> None:
    if self.history is not None and node.accesses:
      self.history.record(self._page_hashes(node), node.accesses)
