"""Prefetch: what is read from storage into host memory, and for whom.

When a request starts to wait, the part of its prompt that is not in host memory is looked up; what
storage has of it in a row is read piece by piece and in order while it waits. The pieces become
host pages like any other. They are held for the request until it waits no longer; then nothing more
is read for it.
"""

import itertools

from strata_jax.config import StorageConfig
from strata_jax.controller.request_state import Prefetch, RequestState
from strata_jax.controller.tiers import CacheTiers, Transfer
from strata_jax.executors.protocol import (
  LookUpDone,
  LookUpWork,
  PrefetchDone,
  PrefetchWork,
  StorageWork,
)
from strata_jax.radix_tree import DEVICE, HOST, Node
from strata_jax.scheduler.views import PrefetchView, RequestView


class Prefetcher:
  """Looks up and reads for requests that wait. Ids of work come from `ids`."""

  def __init__(self, config: StorageConfig, tiers: CacheTiers, ids: "itertools.count[int]") -> None:
    page = tiers.page_size
    self._config = config
    self._tiers = tiers
    self._ids = ids
    self._read_pages = max(1, config.read_tokens // page)
    self._in_flight_pages = max(1, config.prefetch_tokens_in_flight // page)
    self._held_pages = max(1, int(tiers.host.capacity_pages * config.held_host_fraction))
    self._asked: list[LookUpWork] = []  # to be started
    self._look_ups: dict[int, Prefetch] = {}
    self._active: dict[Prefetch, None] = {}  # answered look-ups of waiting requests, oldest first
    self._reads: dict[int, tuple[Transfer, int, int]] = {}  # with prompt positions
    self._reading_pages = 0

  @property
  def is_busy(self) -> bool:
    return bool(self._look_ups or self._reads)

  def queued(self, state: RequestState, now_s: float) -> None:
    """A request starts to wait: looks up what of its prompt no memory has."""
    if state.tip is None:
      return
    first: Node | None = None
    missing = end = 0
    for node in state.tip.path():
      if node.producers:  # somebody computes from here on
        break
      end = node.end
      if not node.ready(HOST):
        first = first or node
        if node.slots[DEVICE] is None:
          missing += len(node.tokens)
    if first is None or missing < self._config.min_prefetch_tokens:
      return
    base, key = self._tiers.known_key(first.parent)
    look_up = LookUpWork(
      work_id=next(self._ids),
      request_id=state.request_id,
      parent_key=key,
      token_ids=state.tokens[base:end],
      skip_pages=(first.start - base) // self._tiers.page_size,
    )
    deadline_s = now_s + self._config.prefetch_timeout_s(missing)
    prefetch = state.prefetch = Prefetch(state, look_up, base, first.start, end, deadline_s)
    self._look_ups[look_up.work_id] = prefetch
    self._tiers.stats.look_ups += 1
    self._asked.append(look_up)

  def is_worth_reading(self, view: RequestView) -> bool:
    """Whether enough of a request's path is known to be in storage and nowhere else."""
    tokens = 0
    for span in view.path:
      if span.state == "storage":
        tokens += span.tokens
      elif span.state not in ("device", "loading", "host"):
        break
    return tokens >= self._config.min_prefetch_tokens

  def left(self, state: RequestState) -> None:
    """A request waits no longer, or not for storage: nothing more is read for it.

    Reads under way end on their own. What came is host memory like any other: no longer held, the
    least recently used of it is evicted when room is needed.
    """
    view = self.view(state)
    prefetch, state.prefetch = state.prefetch, None
    if prefetch is None or view is None:
      return
    self._active.pop(prefetch, None)
    if prefetch.hold is not None:
      self._tiers.release(prefetch.hold)
      prefetch.hold = None
    if view.arrived_tokens < view.expected_tokens:
      self._tiers.stats.cut_prefetches += 1

  def view(self, state: RequestState) -> PrefetchView | None:
    """How far the prefetch of a waiting request is."""
    prefetch = state.prefetch
    if prefetch is None:
      return None
    node, position = self._arrived(prefetch), prefetch.begin
    if node is not None:
      position = max(position, node.end)
    return PrefetchView(
      position - prefetch.begin, prefetch.end - prefetch.begin, prefetch.deadline_s
    )

  def work(self) -> list[StorageWork]:
    """What is to be started now: look-ups, then reads as far as the limits allow."""
    started: list[StorageWork] = [*self._asked]
    self._asked.clear()
    for prefetch in list(self._active):
      if prefetch.next >= prefetch.end and not self._is_on_its_way(prefetch):
        prefetch.next = prefetch.begin
      while prefetch.next < prefetch.end:
        room = self._in_flight_pages - self._reading_pages
        if room <= 0:
          return started
        read = self._read(prefetch, room)
        if read is None and prefetch.next < prefetch.end:
          return started  # others hold the room; who came later waits as well
        if read is None:
          break
        started.append(read)
    return started

  def looked_up(self, event: LookUpDone) -> None:
    """Takes an answer in."""
    prefetch = self._look_ups.pop(event.work_id)
    state = prefetch.state
    if state.prefetch is not prefetch:
      return
    found = event.pages * self._tiers.page_size
    for node in self._nodes(prefetch):
      if node.end > prefetch.begin + found:  # the store evicted it
        self._tiers.uncover(node)
    prefetch.end = min(prefetch.end, prefetch.begin + found)
    nodes = self._nodes(prefetch)
    above = nodes[0].parent if nodes else None
    if (
      found < self._config.min_prefetch_tokens
      or above is None
      or (above.parent is not None and above.slots[HOST] is None)  # evicted meanwhile
    ):
      state.prefetch = None
      self._changed(prefetch)
      return
    self._tiers.stats.found_tokens += found
    self._active[prefetch] = None
    prefetch.hold = self._tiers.hold(nodes[-1])  # all of the path, as soon as it is there
    for node in nodes:
      self._tiers.cover(node)
    self._changed(prefetch)

  def done(self, event: PrefetchDone) -> None:
    """Takes what a read brought in: whole pages in a row; the rest is a miss."""
    transfer, start, end = self._reads.pop(event.work_id)
    tree, page = self._tiers.tree, self._tiers.page_size
    self._reading_pages -= (end - start) // page
    good = min(end, start + event.pages * page)
    self._tiers.stats.prefetched_tokens += good - start
    self._tiers.stats.lost_prefetch_tokens += end - good
    for node in list(transfer.nodes):
      if node.start < good < node.end:
        tree.split(node, good - node.start)
    mine = [node for node in transfer.nodes if start <= node.start and node.end <= end]
    states = {state for node in mine for state in node.waiters if state.prefetch is not None}
    for node in mine:
      if node.start >= good:
        self._tiers.uncover(node)
    self._tiers.finish_prefetch(transfer, lambda node: node.end <= good or node.start >= end)
    for state in sorted(states, key=lambda state: state.sequence):
      if good < end:
        self._shorten(state.prefetch, good)
      self._changed(state.prefetch)

  def clear(self) -> None:
    self._asked.clear()

  # -- inside -------------------------------------------------------------------------------------

  def _nodes(self, prefetch: Prefetch) -> list[Node]:
    """The nodes of [begin, end) of the prompt; cuts the last one there."""
    assert prefetch.state.tip is not None
    nodes: list[Node] = []
    for node in prefetch.state.tip.path():
      if node.end <= prefetch.begin:
        continue
      if node.start >= prefetch.end:
        break
      if node.end > prefetch.end:
        node = self._tiers.tree.split(node, prefetch.end - node.start)
      nodes.append(node)
    return nodes

  def _arrived(self, prefetch: Prefetch) -> Node | None:
    """The last of its nodes up to which all are in memory."""
    last = None
    assert prefetch.state.tip is not None
    for node in prefetch.state.tip.path():
      if node.end <= prefetch.begin:
        continue
      if node.end > prefetch.end or not (node.ready(HOST) or node.ready(DEVICE)):
        break
      last = node
    return last

  def _read(self, prefetch: Prefetch, room: int) -> PrefetchWork | None:
    """Starts the next read of a prefetch; None if it has to wait, or is complete."""
    tiers, page = self._tiers, self._tiers.page_size
    node = self._next_missing(prefetch)
    if node is None:
      return None
    held = {p: (p.next - p.begin) // page for p in self._active}
    left = self._held_pages - sum(held.values())
    pages = min(len(node.tokens) // page, self._read_pages, room, max(left, 0))
    if not pages and sum(held.values()) > held[prefetch]:
      return None  # others hold the room now
    if pages:
      assert node.parent is not None
      tiers.tree.lock(node.parent, HOST)  # not evicted for its own child
      pages = tiers.find_host_room(pages)
      tiers.tree.unlock(node.parent, HOST)
    if not pages:
      self._shorten(prefetch, node.start)
      return None
    if pages * page < len(node.tokens):
      node = tiers.tree.split(node, pages * page)
    transfer = tiers.start_prefetch(node)
    work_id = next(self._ids)
    self._reads[work_id] = (transfer, node.start, node.end)
    self._reading_pages += pages
    prefetch.next = node.end
    tiers.stats.prefetches += 1
    return PrefetchWork(
      work_id=work_id,
      look_up=prefetch.look_up,
      first_page=(node.start - prefetch.base) // page,
      host_slots=node.slots[HOST],
    )

  def _next_missing(self, prefetch: Prefetch) -> Node | None:
    """The first of its nodes without host slots; notes how far the others lead."""
    for node in self._nodes(prefetch):
      if node.slots[HOST] is not None:
        prefetch.next = max(prefetch.next, node.end)
      elif node.producers:  # it is being computed by now
        self._shorten(prefetch, node.start)
        return None
      else:
        return node
    return None

  def _shorten(self, prefetch: Prefetch, end: int) -> None:
    """No more than up to position `end` will come."""
    if end < prefetch.end:
      prefetch.end = max(end, prefetch.begin)
      prefetch.next = min(prefetch.next, prefetch.end)
      self._tiers.stats.shortened_prefetches += 1
      self._changed(prefetch)

  def _is_on_its_way(self, prefetch: Prefetch) -> bool:
    """Whether all of it is in memory or comes; if not, a backup that was counted on has failed."""
    for node in self._nodes(prefetch):
      if node.slots[HOST] is None and not node.ready(DEVICE):
        return False
    return True

  def _changed(self, prefetch: Prefetch) -> None:
    self._tiers.tree.dirty_waiters.add(prefetch.state)
