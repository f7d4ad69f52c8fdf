"""Takes back what a running request holds, when it is over or preempted."""

from strata_jax.controller.publishing import end_growth, path_below, publish
from strata_jax.controller.request_state import RequestState
from strata_jax.controller.tiers import CacheTiers
from strata_jax.radix_tree import DEVICE


def release(tiers: CacheTiers, state: RequestState, keep_tokens: int) -> None:
  """Publishes what is left to publish; gives back locks, transient nodes and own pages.

  Of its context at most `keep_tokens` go into the cache, in whole pages.
  """
  tree = tiers.tree
  end = min(keep_tokens, state.context_tokens)
  publish(tiers, state, end - end % tiers.page_size)
  end_growth(tiers, state)
  leaf, tip = state.leaf, state.tip
  if leaf is not None and tip is not None:
    if tip.end > leaf.end:
      for node in path_below(tip, leaf):
        node.producers.pop(state, None)
        tree.changed(node)
    tree.unlock(leaf, DEVICE)
    tree.prune(tip if tip.end > leaf.end else leaf)
  state.load_ids = []
  state.duplicate_pages = 0
  tiers.device.free(state.give_up(0, state.page_count))
  state.page_count = 0
