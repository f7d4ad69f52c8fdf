"""Publishes computed pages into the tree, and takes over what others published."""

from strata_jax.controller.request_state import RequestState
from strata_jax.controller.tiers import CacheTiers
from strata_jax.radix_tree import DEVICE, HOST, Node


def publish(tiers: CacheTiers, state: RequestState, end: int) -> None:
  """Makes the request's pages up to position `end` (whole pages) part of the tree.

  Where the tree has pages already it keeps them, and the request keeps its own for itself. The
  request's device lock reaches down to `end` afterwards.
  """
  tree, page_size = tiers.tree, tiers.page_size
  leaf = state.leaf
  if leaf is None or leaf.end >= end:
    return
  if _can_grow(state, leaf):
    first = leaf.start
    _give_to_tree(state, leaf.end // page_size, end // page_size)
    tree.grow(leaf, state.tokens[first:end], state.pages[first // page_size : end // page_size])
    tree.touch(leaf)
    state.counted_tokens = max(state.counted_tokens, end)
    return
  end_growth(tiers, state)
  decodes = state.phase == "decode"
  fresh = False
  for node in tree.extend(leaf, state.tokens, leaf.end, end):
    node.producers.pop(state, None)
    first, last = node.start // page_size, node.end // page_size
    fresh = node.slots[DEVICE] is None
    if fresh:
      _give_to_tree(state, first, last)
      tree.attach(node, DEVICE, state.pages[first:last].copy())
    else:
      duplicates = int(state.owned[first:last].sum())
      state.duplicate_pages += duplicates
      tiers.stats.duplicate_tokens += duplicates * page_size
    tree.lock_below(node, DEVICE)
    count_access(tiers, state, node, backs_up=not (decodes and fresh))
    state.leaf = node
  assert state.leaf is not None
  tree.touch(state.leaf)
  leaf = state.leaf
  if decodes and fresh and not (leaf.children or leaf.waiters or leaf.slots[HOST] is not None):
    state.growing = leaf
    first = leaf.start // page_size
    tree.grow(leaf, state.tokens[leaf.start : end], state.pages[first : end // page_size])
  elif decodes:
    tiers.want_backup(leaf)


def give_up_duplicates(tiers: CacheTiers, state: RequestState) -> None:
  """Lets a running request use the tree's pages where it keeps its own of the same tokens.

  For a full pool only: the tree's pages were computed in other chunks and may differ in last bits.
  """
  if not state.duplicate_pages or state.leaf is None or state.in_step:
    return
  for node in state.leaf.path():
    if node.ready(DEVICE):
      own = state.use_shared(node.start // tiers.page_size, node.slots[DEVICE])
      state.duplicate_pages -= len(own)
      tiers.device.free(own)


def end_growth(tiers: CacheTiers, state: RequestState) -> None:
  """The node of the request's decoded pages gets no more of them; it may be backed up now."""
  node = state.growing
  if node is not None:
    state.growing = None
    if node.growing:
      tiers.tree.end_growth(node)
    tiers.want_backup(node)


def take_over(tiers: CacheTiers, state: RequestState, limit: int) -> None:
  """Uses nodes below the request's leaf that are on the device by now, instead of computing them.

  As far as they lead without a gap, up to position `limit`; the request's own pages for them are
  freed.
  """
  leaf, tip = state.leaf, state.tip
  if leaf is None or tip is None or leaf.end >= limit or tip.end <= leaf.end:
    return
  for node in path_below(tip, leaf):
    if node.end > limit or not node.ready(DEVICE):
      break
    use_node(tiers, state, node)


def use_node(tiers: CacheTiers, state: RequestState, node: Node) -> None:
  """Locks the next node of a running request's path, which has device slots, and uses them."""
  page_size = tiers.page_size
  tiers.tree.lock_below(node, DEVICE)
  node.producers.pop(state, None)
  tiers.tree.changed(node)
  state.leaf = node
  own = state.use_shared(node.start // page_size, node.slots[DEVICE])
  tiers.device.free(own)
  state.context_tokens = node.end
  tiers.stats.taken_over_tokens += len(own) * page_size
  count_access(tiers, state, node)
  tiers.tree.touch(node)


def count_access(
  tiers: CacheTiers, state: RequestState, node: Node, *, backs_up: bool = True
) -> None:
  """Counts one access of the node by this request, unless its tokens were counted before.

  What the history knows of a node that was evicted meanwhile is added; where only its beginning
  reaches the threshold of the write policy, the node is split there.
  """
  if node.start < state.counted_tokens:
    return
  tree = tiers.tree
  state.counted_tokens = node.end
  upper: Node | None = None
  if tree.history is not None and not node.accesses:
    known = tree.known_accesses(node)
    hot = int((known >= tiers.threshold - 1).sum())
    if 0 < hot < len(known):
      upper = tree.split(node, hot * tiers.page_size)
      upper.accesses = int(known[hot - 1]) + 1
    node.accesses = int(known[-1])
  node.accesses += 1
  if backs_up:
    if upper is not None:
      tiers.want_backup(upper)
    tiers.want_backup(node)


def path_below(tip: Node, leaf: Node) -> list[Node]:
  """The nodes from below `leaf` down to `tip`."""
  nodes = []
  node = tip
  while node is not leaf:
    nodes.append(node)
    parent = node.parent
    assert parent is not None, "the tip is not below the leaf"
    node = parent
  nodes.reverse()
  return nodes


def _can_grow(state: RequestState, leaf: Node) -> bool:
  return (
    leaf is state.growing
    and leaf.growing
    and leaf.locks[DEVICE] == 1
    and not leaf.children
    and not leaf.waiters
    and not leaf.producers
  )


def _give_to_tree(state: RequestState, first: int, last: int) -> None:
  owned = state.owned
  assert owned[first:last].all() if last - first > 1 else owned[first], (
    "published pages are its own"
  )
  owned[first:last] = False
  state.own_pages -= last - first
