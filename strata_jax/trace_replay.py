"""Replays prompts through the tree alone: what a prefix cache of a given size would hit.

No requests run: each prompt is looked up and then inserted at once, one after the other.
"""

import numpy as np

from strata_jax.page_allocator import PageAllocator
from strata_jax.radix_tree import DEVICE, HiRadixTree, Node
from strata_jax.token_arrays import as_tokens

_UNBOUNDED_PAGES = 2**31 - 1  # slots are int32


class PrefixCache:
  """A device pool behind a HiRadixTree with leaf-first LRU eviction.

  `capacity_pages` None: no limit.
  """

  def __init__(self, page_size: int, capacity_pages: int | None = None) -> None:
    self.tree = HiRadixTree(page_size)
    self.allocator = PageAllocator(_UNBOUNDED_PAGES if capacity_pages is None else capacity_pages)
    self.input_tokens = 0
    self.hit_tokens = 0

  def admit(self, tokens: np.ndarray, *, salt: str = "", adapter: str = "") -> int:
    """Looks a prompt up, then inserts its whole pages. Returns the tokens that it could reuse.

    Reusable are whole pages, at most all but one token of the prompt. Where the pool is too small
    for the whole prompt, its beginning is kept.
    """
    tokens = as_tokens(tokens)
    tree, page_size = self.tree, self.tree.page_size
    self.input_tokens += len(tokens)
    whole = len(tokens) // page_size * page_size
    if not whole:
      return 0
    root = tree.root(salt, adapter)
    path = tree.extend(root, tokens, 0, whole)
    fresh = path[-1] if path[-1].slots[DEVICE] is None else None  # the rest was there
    known = path[:-1] if fresh else path
    reusable = min(known[-1].end if known else 0, (len(tokens) - 1) // page_size * page_size)
    self.hit_tokens += reusable
    held = known[-1] if known else root
    tree.lock(held, DEVICE)
    if fresh is not None:
      self._fill(fresh)
    tree.touch(path[-1])
    tree.unlock(held, DEVICE)
    return reusable

  def _fill(self, node: Node) -> None:
    tree, page_size = self.tree, self.tree.page_size
    wanted = len(node.tokens) // page_size
    short = wanted - self.allocator.free_pages
    if short > 0:
      for slots in tree.evict(DEVICE, short):
        self.allocator.free(slots)
    room = min(wanted, self.allocator.free_pages)
    if 0 < room < wanted:
      node, rest = tree.split(node, room * page_size), node
      tree.attach(node, DEVICE, self.allocator.allocate(room))
      tree.prune(rest)
    elif room:
      tree.attach(node, DEVICE, self.allocator.allocate(room))
    else:
      tree.prune(node)
