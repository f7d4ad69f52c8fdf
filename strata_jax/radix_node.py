"""A node of the HiRadixTree: a run of whole pages and what each tier holds of it."""

from typing import Any

import numpy as np

from strata_jax.scheduler.views import Span, SpanState

DEVICE = 0
HOST = 1
TIERS = (DEVICE, HOST)


class Node:
  """An edge of the tree with its lower end. Lists `[device, host]` are indexed by tier.

  A node's state follows from what it holds, see `state`. Waiters, producers and transfers are
  objects of the tree's user; the tree only carries them along.
  """

  __slots__ = (
    "accesses",
    "backup_due",
    "children",
    "end",
    "growing",
    "holders",
    "id",
    "locks",
    "order",
    "parent",
    "prefix_hash",
    "producers",
    "queued",
    "slots",
    "span",
    "storage",
    "storage_key",
    "tokens",
    "transfers",
    "used",
    "waiters",
  )

  def __init__(
    self, node_id: int, order: int, parent: "Node | None", tokens: np.ndarray, end: int
  ) -> None:
    self.id = node_id  # stays with the upper part of a split; never used twice
    self.order = order  # of creation, breaks ties of the LRU order
    self.parent = parent  # None: the root of a namespace
    self.children: dict[Any, Node] = {}  # by the tokens of their first page
    self.tokens = tokens  # int32 [tokens], whole pages
    self.end = end  # prompt position after the last token
    self.slots: list[Any] = [None, None]  # int32 [pages], None: not there
    self.transfers: list[Any] = [None, None]  # set while the slots are being filled
    self.locks = [0, 0]  # users of the slots of this node or of one below
    self.holders = [0, 0]  # children that have slots
    self.queued = [False, False]  # stands in the LRU queue
    self.storage = False  # covered by the storage tier
    self.storage_key: bytes | None = None  # of its last page, once it is known
    self.producers: dict[Any, None] = {}  # requests that will compute it, the first is in charge
    self.waiters: set[Any] = set()  # waiting requests whose path leads through it
    self.accesses = 0
    self.used = 0  # logical time of the last use
    self.growing = False  # its request may still append decoded pages
    self.backup_due = False
    self.span: Span | None = None  # cached
    self.prefix_hash: Any = None  # int once known, for the access history, made lazily

  @property
  def start(self) -> int:
    """Prompt position of the first token."""
    return self.end - len(self.tokens)

  @property
  def state(self) -> SpanState:
    """What a request would find here.

    Pages that are under way to the host are no host pages yet; a producer comes before storage,
    so that a prompt which is being computed is waited for instead of read.
    """
    if self.slots[DEVICE] is not None:
      return "device" if self.transfers[DEVICE] is None else "loading"
    if self.slots[HOST] is not None and self.transfers[HOST] is None:
      return "host"
    if self.producers:
      return "in_flight"
    transfer = self.transfers[HOST]
    if transfer is not None and transfer.is_prefetch:
      return "prefetching"
    return "storage" if self.storage else "in_queue"

  def ready(self, tier: int) -> bool:
    """Whether the tier has the bytes of this node."""
    return self.slots[tier] is not None and self.transfers[tier] is None

  def is_bare(self) -> bool:
    """Whether nothing and nobody needs the node (storage finds its pages by content)."""
    return not (
      self.children
      or self.producers
      or self.waiters
      or self.slots[DEVICE] is not None
      or self.slots[HOST] is not None
      or self.locks[DEVICE]
    )

  def path(self) -> list["Node"]:
    """The nodes from the root (left out) down to this one."""
    nodes = []
    node, parent = self, self.parent
    while parent is not None:
      nodes.append(node)
      node, parent = parent, parent.parent
    nodes.reverse()
    return nodes

  def __repr__(self) -> str:
    return f"Node(id={self.id}, [{self.start}, {self.end}), {self.state})"
