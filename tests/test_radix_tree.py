"""Tests of strata_jax.radix_tree and strata_jax.radix_node."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jax.page_allocator import PageAllocator
from strata_jax.radix_tree import DEVICE, HOST, HiRadixTree
from strata_jax.tree_checks import check_slots, check_tree


class Cache:
  """A tree with a device pool."""

  def __init__(self, page_size: int, pages: int = 1000) -> None:
    self.tree = HiRadixTree(page_size)
    self.pool = PageAllocator(pages)

  def insert(self, ids, **namespace):
    slots = self.pool.allocate(len(ids) // self.tree.page_size)
    inserted = self.tree.insert(ids, slots, **namespace)
    self.pool.free(inserted.duplicate_slots)
    self.check()
    return inserted.nodes

  def evict(self, pages: int) -> int:
    freed = 0
    for slots in self.tree.evict(DEVICE, pages):
      self.pool.free(slots)
      freed += len(slots)
    self.check()
    return freed

  def match(self, ids, **namespace) -> int:
    return self.tree.match(ids, **namespace).tokens

  @property
  def total(self) -> int:
    return self.tree.pages[DEVICE].held * self.tree.page_size

  def check(self) -> None:
    check_tree(self.tree)
    check_slots(self.tree, DEVICE, self.pool)
    pages = self.tree.pages[DEVICE]
    in_tree = pages.evictable + pages.protected + pages.in_transfer
    assert self.pool.free_pages + in_tree == self.pool.capacity_pages


def test_match_finds_the_longest_prefix():
  cache = Cache(1)
  cache.insert([1, 2, 3])
  assert [cache.match(ids) for ids in ([1, 2, 3], [1, 2], [6, 7], [], [1, 2, 3, 4])] == [
    3, 2, 0, 0, 3,
  ]  # fmt: skip


@pytest.mark.parametrize("page_size", [1, 2])
def test_inserts_that_part_split_a_node(page_size):
  cache = Cache(page_size)
  (node,) = cache.insert([1, 2, 3, 4, 5, 6, 7, 8])
  first_id = node.id
  upper, other = cache.insert([1, 2, 9, 10])
  assert cache.total == 10
  assert cache.match([1, 2, 3, 4, 999]) == 4
  assert cache.total == 10
  assert upper.id == first_id
  assert node.id not in (first_id, other.id)
  assert (upper.start, upper.end, node.start, node.end) == (0, 2, 2, 8)
  assert upper.accesses == 2
  assert node.accesses == 1


def test_matches_are_whole_pages():
  cache = Cache(4)
  cache.insert([1, 2, 3, 4, 5, 6, 7, 8])
  assert cache.match([1, 2, 3, 4, 5, 6, 7]) == 4
  assert cache.match([1, 2, 3]) == 0
  cache = Cache(2)
  cache.insert([1, 2, 3, 4, 5, 6])
  assert cache.match([1, 2, 3, 4, 7, 8]) == 4
  assert cache.match([1, 2, 3, 9]) == 2


def test_a_partial_last_page_is_not_inserted():
  cache = Cache(4)
  cache.insert([1, 2, 3, 4, 5, 6])
  assert cache.total == 4


def test_namespaces_share_nothing():
  cache = Cache(1)
  ids = [1, 2, 3]
  names = [{}, {"salt": "X"}, {"salt": "Y"}, {"adapter": "X"}, {"salt": "X", "adapter": "X"}]
  for count, name in enumerate(names):
    assert cache.match(ids, **name) == 0
    cache.insert(ids, **name)
    assert cache.total == 3 * (count + 1)
  assert all(cache.match(ids, **name) == 3 for name in names)


def test_the_second_insert_keeps_the_first_pages():
  tree = HiRadixTree(1)
  tree.insert([1, 2, 3], np.array([10, 11, 12], np.int32))
  inserted = tree.insert([1, 2, 4], np.array([20, 21, 22], np.int32))
  assert inserted.duplicate_slots.tolist() == [20, 21]
  slots = np.concatenate([node.slots[DEVICE] for node in inserted.nodes])
  assert slots.tolist() == [10, 11, 22]


def test_insert_below_a_node():
  tree = HiRadixTree(2)
  (top,) = tree.insert([1, 2], np.array([0], np.int32)).nodes
  (node,) = tree.insert([3, 4], np.array([1], np.int32), below=top).nodes
  assert (node.start, node.end) == (2, 4)
  assert tree.match([1, 2, 3, 4]).tokens == 4


def test_stored_tokens_do_not_follow_the_callers_array():
  tree = HiRadixTree(1)
  ids = np.array([1, 2, 3], np.int32)
  tree.insert(ids, np.arange(3, dtype=np.int32))
  ids[:] = 7
  assert tree.match([1, 2, 3]).tokens == 3


def test_held_tokens_by_tier():
  tree = HiRadixTree(1)
  first = tree.insert([1, 2], np.arange(2, dtype=np.int32)).nodes[0]
  tree.attach(first, HOST, np.arange(2, dtype=np.int32))
  tree.insert([1, 2, 3], np.arange(3, dtype=np.int32))
  match = tree.match([1, 2, 3, 4])
  assert (match.held_tokens(DEVICE), match.held_tokens(HOST)) == (3, 2)


def test_locking_moves_pages_from_evictable_to_protected():
  cache = Cache(1)
  (leaf,) = cache.insert([1, 2, 3])
  pages = cache.tree.pages[DEVICE]
  assert (pages.evictable, pages.protected) == (3, 0)
  cache.tree.lock(leaf, DEVICE)
  assert (pages.evictable, pages.protected) == (0, 3)
  assert cache.evict(5) == 0
  cache.insert([1, 9])  # splits the locked node
  assert (pages.evictable, pages.protected) == (1, 3)
  cache.tree.unlock(leaf, DEVICE)
  cache.check()
  assert (pages.evictable, pages.protected) == (4, 0)
  with pytest.raises(AssertionError, match="not locked"):
    cache.tree.unlock(leaf, DEVICE)
  assert cache.evict(9) == 4


def test_eviction_takes_the_oldest_leaf_first():
  cache = Cache(1)
  cache.insert([1, 2])
  cache.insert([1, 3])
  cache.insert([5, 6])
  cache.insert([1, 2])  # used again
  assert cache.evict(1) == 1
  assert [cache.match([1, x]) for x in (2, 3)] == [2, 1]
  assert cache.evict(2) == 2
  assert cache.match([5, 6]) == 0
  assert cache.match([1, 2]) == 2


def test_equal_times_break_ties_by_insertion():
  orders = []
  for _ in range(3):
    cache = Cache(1)
    for first in (4, 2, 9, 7):
      cache.insert([first])
    for node in cache.tree.nodes.values():
      node.used = 0
    cache.tree._queues[DEVICE][:] = []
    for node in reversed(list(cache.tree.nodes.values())):
      node.queued[DEVICE] = False
      cache.tree._queue(node, DEVICE)
    orders.append([])
    while cache.total:
      orders[-1].append(cache.tree.victim(DEVICE, 1).tokens[0])
      cache.pool.free(cache.tree.detach(cache.tree.match([orders[-1][-1]]).nodes[0], DEVICE))
  assert orders == [[4, 2, 9, 7]] * 3


def test_eviction_frees_the_shortfall_and_keeps_the_beginning():
  cache = Cache(2)
  cache.insert(list(range(20)))
  assert cache.evict(3) == 3
  assert cache.match(list(range(20))) == 14


def test_ids_are_never_used_twice():
  cache = Cache(1)
  seen = set()
  for round_ in range(5):
    nodes = [*cache.insert([1, 2, 3, round_]), *cache.insert([1, 2, 7, round_])]
    new = {node.id for node in nodes} - seen
    assert new
    seen |= new
    cache.evict(100)
    assert not cache.tree.nodes
    assert not list(cache.tree.roots())
  cache.insert([1])
  assert not seen & cache.tree.nodes.keys()


def test_split_takes_everything_along():
  tree = HiRadixTree(2)
  node = tree.insert(range(8), np.arange(4, dtype=np.int32)).nodes[0]
  tree.attach(node, HOST, np.array([9, 8, 7, 6], np.int32))
  tree.lock(node, DEVICE)
  tree.lock(node, HOST)
  node.storage = True
  node.producers["p"] = None
  node.waiters.add("w")
  old_id = node.id
  upper = tree.split(node, 2)
  assert tree.nodes[old_id] is upper
  assert tree.dirty_waiters == {"w"}
  for part, device, host in ((upper, [0], [9]), (node, [1, 2, 3], [8, 7, 6])):
    assert part.slots[DEVICE].tolist() == device
    assert part.slots[HOST].tolist() == host
    assert part.locks == [1, 1]
    assert part.storage
    assert list(part.producers) == ["p"]
    assert part.waiters == {"w"}
    assert part.accesses == 1
    assert tree.nodes[part.id] is part
  check_tree(tree)


@pytest.mark.parametrize("tokens", [0, 1, 3, 8])
def test_a_split_inside_a_page_is_an_error(tokens):
  tree = HiRadixTree(2)
  node = tree.insert(range(8), np.arange(4, dtype=np.int32)).nodes[0]
  with pytest.raises(ValueError, match="whole pages inside"):
    tree.split(node, tokens)


def split_node():
  """A tree with a node of 4 pages, on both tiers, in three parts; the deepest one."""
  tree = HiRadixTree(2)
  node = tree.insert(range(8), np.arange(4, dtype=np.int32)).nodes[0]
  tree.attach(node, HOST, np.array([9, 8, 7, 6], np.int32))
  tree.lock(node, HOST)
  node.waiters.add("w")
  tree.split(tree.split(node, 4), 2)
  tree.dirty_waiters.clear()
  return tree, node


def test_a_join_undoes_splits():
  tree, node = split_node()
  child = tree.insert(range(8, 10), np.array([4], np.int32), below=node).nodes[0]
  top_id = node.path()[0].id
  assert len(tree.nodes) == 4
  assert tree.join(node) is node
  assert tree.dirty_waiters == {"w"}  # whose path is another one now
  assert tree.match(range(10)).nodes == (node, child)
  assert tree.nodes == {top_id: node, child.id: child}
  assert (node.id, node.start, node.end) == (top_id, 0, 8)
  assert node.tokens.tolist() == list(range(8))
  assert [slots.tolist() for slots in node.slots] == [[0, 1, 2, 3], [9, 8, 7, 6]]
  assert node.locks == [0, 1]
  check_tree(tree)
  freed = [slots.tolist() for slots in tree.evict(DEVICE, 4)]
  assert freed == [[4], [1, 2, 3]]  # the deepest first, though the parts stood in the queue
  check_tree(tree)


@pytest.mark.parametrize(
  "differ",
  [
    lambda tree, upper, node: tree.touch(upper),
    lambda tree, upper, node: setattr(upper, "accesses", 2),
    lambda tree, upper, node: tree.lock(upper, DEVICE),
    lambda tree, upper, node: tree.lock(upper, HOST),
    lambda tree, upper, node: tree.detach(node, DEVICE),
    lambda tree, upper, node: setattr(upper, "storage", True),
    lambda tree, upper, node: setattr(node, "growing", True),
    lambda tree, upper, node: setattr(upper, "backup_due", True),
    lambda tree, upper, node: upper.producers.update(p=None),
    lambda tree, upper, node: upper.waiters.add("v"),
    lambda tree, upper, node: tree.insert([7, 7], np.array([5], np.int32), below=upper),
  ],
)
def test_neighbours_that_differ_are_not_joined(differ):
  tree, node = split_node()
  upper = node.parent
  differ(tree, upper, node)
  above = upper.parent
  tree.join(node)
  assert node.parent is upper
  assert upper.parent in (above, tree.root())  # with the one above it may have become one


def test_transfers_are_not_joined():
  class Transfer:
    def __init__(self):
      self.nodes = []

  tree = HiRadixTree(2)
  node = tree.insert(range(8), np.arange(4, dtype=np.int32)).nodes[0]
  transfer = Transfer()
  transfer.nodes.append(node)
  tree.attach(node, HOST, np.array([9, 8, 7, 6], np.int32), transfer)
  upper = tree.split(node, 4)
  tree.join(node)
  assert node.parent is upper
  for part in transfer.nodes:
    tree.arrived(part, HOST)
  assert tree.join(node) is node
  check_tree(tree)


def test_states():
  tree = HiRadixTree(1)
  node = tree.extend(tree.root(), np.arange(3, dtype=np.int32), 0, 3)[0]
  node.waiters.add("w")
  assert node.state == "in_queue"
  node.storage = True
  assert node.state == "storage"
  node.producers["p"] = None
  assert node.state == "in_flight"

  class Transfer:
    is_prefetch = True

    def __init__(self):
      self.nodes = [node]

  prefetch = Transfer()
  node.producers.clear()
  tree.attach(node, HOST, np.arange(3, dtype=np.int32), prefetch)
  assert node.state == "prefetching"
  tree.arrived(node, HOST)
  assert node.state == "host"
  tree.attach(node, DEVICE, np.arange(3, dtype=np.int32), Transfer())
  assert node.state == "loading"
  assert tree.pages[DEVICE].in_transfer == 3
  check_tree(tree)
  tree.arrived(node, DEVICE)
  assert node.state == "device"
  tree.detach(node, DEVICE)
  assert node.state == "host"
  tree.detach(node, HOST)
  tree.prune(node)
  assert tree.nodes
  node.waiters.clear()
  tree.prune(node)
  assert not tree.nodes


def test_wrong_number_of_slots_is_an_error():
  with pytest.raises(ValueError, match="expected 2 for 5 tokens, got 3"):
    HiRadixTree(2).insert(range(5), np.arange(3, dtype=np.int32))


def test_page_size_is_at_least_one():
  with pytest.raises(ValueError, match="page_size"):
    HiRadixTree(0)


paths = st.lists(st.integers(0, 2), max_size=14)


@given(st.integers(1, 3), st.lists(st.tuples(paths, st.integers(0, 9)), max_size=30), st.booleans())
def test_random_inserts_and_evictions(page_size, steps, joins):
  """Against the set of all prefixes in whole pages."""
  cache = Cache(page_size, 200)
  known: set[tuple[int, ...]] = set()

  def prefixes(ids):
    return {tuple(ids[:end]) for end in range(page_size, len(ids) + 1, page_size)}

  for ids, evicted in steps:
    if evicted < 3 and known:
      before = cache.tree.pages[DEVICE].held
      cache.evict(evicted)
      assert cache.tree.pages[DEVICE].held == max(before - evicted, 0)
      known = {prefix for prefix in known if cache.match(prefix) == len(prefix)}
    else:
      nodes = cache.insert(ids)
      known |= prefixes(ids)
      if joins and nodes:
        cache.tree.join(nodes[-1])
        cache.check()
    assert cache.tree.pages[DEVICE].held == len(known)
    for length in range(len(ids) + 1):
      expected = max((len(p) for p in prefixes(ids[:length]) & known), default=0)
      assert cache.match(ids[:length]) == expected
