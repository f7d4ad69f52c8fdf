"""Invariants of the controller over all tiers and requests: for tests and debugging."""

from collections import Counter
from collections.abc import Iterable, Sequence

from strata_jax.controller.request_state import RequestState
from strata_jax.controller.tiers import CacheTiers
from strata_jax.radix_tree import DEVICE, HOST
from strata_jax.tree_checks import check_slots, check_tree, walk


def check_controller(
  tiers: CacheTiers,
  states: Iterable[RequestState],
  waiting: Sequence[RequestState],
  running: Iterable[RequestState],
) -> None:
  """Raises AssertionError when accounting, locks or references are wrong in any tier."""
  running = list(running)
  assert Counter(waiting) + Counter(running) == Counter(states), "a request is lost or twice there"
  tree = tiers.tree
  check_tree(tree)
  own = tuple(state.own_slots() for state in running)
  check_slots(tree, DEVICE, tiers.device, own)
  check_slots(tree, HOST, tiers.host)
  private = sum(map(len, own))
  for tier, pool, kept in ((DEVICE, tiers.device, private), (HOST, tiers.host, 0)):
    pages = tree.pages[tier]
    total = pool.free_pages + pages.evictable + pages.protected + kept + pages.in_transfer
    assert total == pool.capacity_pages, f"tier {tier}: {total} pages of {pool.capacity_pages}"
  _check_references(tiers, waiting, running)


def _check_references(
  tiers: CacheTiers, waiting: Sequence[RequestState], running: Sequence[RequestState]
) -> None:
  page_size = tiers.page_size
  locks: tuple[Counter, Counter] = (Counter(), Counter())
  waiters: Counter = Counter()
  producers: Counter = Counter()
  for transfer in tiers.transfers.values():
    for end, tier in transfer.locks:
      locks[tier].update(end.path())
    for node in transfer.nodes:
      assert node.transfers[transfer.tier] is transfer, f"{node} knows nothing of its transfer"
  for state in waiting:
    assert state.phase == "waiting"
    assert state.page_count == 0
    if state.tip is not None:
      assert state.tip.end == state.cap_tokens
      waiters.update((node, state) for node in state.tip.path())
  for state in running:
    assert state.phase != "waiting"
    assert state.own_pages == len(state.own_slots())
    whole = state.context_tokens
    assert state.page_count * page_size >= whole, "a page table too short for its context"
    if state.leaf is None or state.tip is None:
      continue
    locks[DEVICE].update(state.leaf.path())
    if state.phase == "decode":
      assert whole - state.leaf.end < page_size or state.in_step or whole > state.leaf.end
    else:
      assert state.leaf.end == whole, f"request {state.request_id}: {state.leaf}, not at {whole}"
    for node in state.leaf.path():
      mine = state.pages[node.start // page_size : node.end // page_size]
      own = state.owned[node.start // page_size : node.end // page_size]
      assert ((mine == node.slots[DEVICE]) | own).all(), f"{node}: a page table went astray"
      assert (state.tokens[node.start : node.end] == node.tokens).all(), f"{node}: other tokens"
    node = state.tip
    while node.end > state.leaf.end:
      producers[node, state] += 1
      assert node.parent is not None
      node = node.parent
  for node in walk(tiers.tree):
    assert node.locks[DEVICE] == locks[DEVICE][node], f"{node}: {node.locks} locks"
    assert node.locks[HOST] == locks[HOST][node], f"{node}: {node.locks} locks"
    assert all(waiters.pop((node, state), 0) == 1 for state in node.waiters), f"{node}: waiters"
    assert all(producers.pop((node, s), 0) == 1 for s in node.producers), f"{node}: producers"
  assert not +waiters, "a waiting request is unknown to a node of its path"
  assert not +producers, "a producer is unknown to a node of its path"
