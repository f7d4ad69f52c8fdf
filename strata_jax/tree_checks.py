"""Invariants of a HiRadixTree, looked at node by node: for tests and debugging."""

from collections.abc import Iterator

import numpy as np

from strata_jax.page_allocator import PageAllocator
from strata_jax.radix_tree import DEVICE, HOST, TIERS, HiRadixTree, Node


def check_tree(tree: HiRadixTree) -> None:
  """Raises AssertionError when structure, coverage or counters of the tree are wrong."""
  seen: dict[int, Node] = {}
  held, evictable, in_transfer = [0, 0], [0, 0], [0, 0]
  for node in walk(tree):
    parent = node.parent
    assert parent is not None
    assert node.id not in seen, f"two nodes have the id {node.id}"
    seen[node.id] = node
    assert tree.nodes.get(node.id) is node, f"{node} is not in the index"
    assert len(node.tokens), f"{node} is empty"
    assert len(node.tokens) % tree.page_size == 0, f"{node} has a partial page"
    assert node.start == parent.end, f"{node} does not start where its parent ends"
    key = tree.page_key(node.tokens, 0)
    assert parent.children.get(key) is node, f"{node} stands under a wrong key"
    assert not node.is_bare(), f"{node} holds nothing and nobody needs it"
    assert node.span is None or node.span == (
      node.id, len(node.tokens), node.state, node.locks[DEVICE] > 0,
    ), f"{node} has an outdated span {node.span}"  # fmt: skip
    for tier in TIERS:
      slots = node.slots[tier]
      children = sum(child.slots[tier] is not None for child in node.children.values())
      assert node.holders[tier] == children, f"{node}: {children} children have slots"
      assert node.locks[tier] >= max((c.locks[tier] for c in node.children.values()), default=0)
      if slots is None:
        assert node.transfers[tier] is None, f"{node}: a transfer into nothing"
        for child in node.children.values():  # a child's backup outlives its parent's that failed
          assert child.slots[tier] is None or (tier == HOST and child.transfers[HOST]), (
            f"{child} has slots in tier {tier}, its parent has none"
          )
        continue
      pages = len(node.tokens) // tree.page_size
      assert slots.shape == (pages,), f"{node}: {len(slots)} slots for {pages} pages in {tier}"
      held[tier] += pages
      if node.transfers[tier] is not None:
        assert node in node.transfers[tier].nodes, f"{node} is unknown to its transfer"
        in_transfer[tier] += pages
      elif not node.locks[tier]:
        evictable[tier] += pages
        assert children or node.queued[tier], f"{node} cannot be found for eviction"
    assert not node.locks[DEVICE] or node.slots[DEVICE] is not None, f"{node}: a lock on nothing"
    if node.ready(HOST) and parent.parent is not None:
      assert parent.ready(HOST), f"{node} is on host, its parent is not"
    assert not node.storage or parent.storage or parent.parent is None, f"{node}: storage hole"
  assert len(seen) == len(tree.nodes), "the index has nodes that the tree has not"
  for tier in TIERS:
    pages = tree.pages[tier]
    counted = (held[tier], evictable[tier], in_transfer[tier])
    assert (pages.held, pages.evictable, pages.in_transfer) == counted, (
      f"{tier}: {pages}, {counted}"
    )


def check_slots(
  tree: HiRadixTree, tier: int, allocator: PageAllocator, others: tuple[np.ndarray, ...] = ()
) -> None:
  """Each slot in use belongs to exactly one node (or to one of `others`), and none is lost."""
  owned = [node.slots[tier] for node in walk(tree) if node.slots[tier] is not None]
  slots = np.concatenate([*owned, *others]) if owned or others else np.empty(0, np.int32)
  assert len(np.unique(slots)) == len(slots), f"tier {tier}: a slot has two owners"
  used = np.flatnonzero(allocator.used_mask())
  assert np.array_equal(np.sort(slots), used), f"tier {tier}: slots in use differ from those owned"


def walk(tree: HiRadixTree) -> Iterator[Node]:
  """All nodes but the roots, parents first."""
  pending = [child for root in tree.roots() for child in root.children.values()]
  while pending:
    node = pending.pop()
    yield node
    pending.extend(node.children.values())
