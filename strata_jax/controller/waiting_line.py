"""The requests that wait, in arrival order, with their views and the counts of their waiting."""

import bisect
import sys
from collections.abc import Iterator, Sequence

from strata_jax.controller import admission, view_builder
from strata_jax.controller.request_state import RequestState
from strata_jax.controller.tiers import CacheTiers
from strata_jax.radix_tree import DEVICE
from strata_jax.scheduler.views import Deferred, RequestView, StepPlan
from strata_jax.storage_tier import StorageTier


class WaitingLine:
  """Keeps one cached view a request, made anew only when something about it has changed."""

  def __init__(self, tiers: CacheTiers, storage: StorageTier | None = None) -> None:
    self._tiers = tiers
    self._storage = storage
    self._states: list[RequestState] = []
    self._views: tuple[RequestView, ...] | None = ()  # None: to be made

  def __iter__(self) -> Iterator[RequestState]:
    return iter(self._states)

  def add(self, state: RequestState, now_s: float) -> None:
    """Puts a request at its place by arrival, and its path into the tree."""
    admission.enter_waiting(self._tiers, state)
    if self._storage is not None:
      self._storage.queued(state, now_s)
    bisect.insort(self._states, state, key=lambda state: state.sequence)
    self.changed(state)

  def remove(self, state: RequestState) -> None:
    """Takes a request out that was admitted: the tree knows it as a running one."""
    self._states.remove(state)
    self._views = None
    if self._storage is not None:
      self._storage.left(state)
    state.front, state.after, state.progress = False, (), None

  def drop(self, state: RequestState) -> None:
    """Takes a request out that will not run."""
    self.remove(state)
    admission.leave_waiting(self._tiers, state)

  def changed(self, state: RequestState) -> None:
    """The request's view is to be made anew."""
    state.view = None
    self._views = None

  def views(self) -> tuple[RequestView, ...]:
    """All views, in arrival order; the same objects as long as nothing changes."""
    dirty = self._tiers.tree.dirty_waiters
    for state in dirty:
      self.changed(state)
    dirty.clear()
    if self._views is None:
      for state in self._states:
        if state.view is None:
          state.view = self._make_view(state)
          if self._storage is not None and self._storage.reads_again(state, state.view):
            state.view = self._make_view(state)
      self._views = tuple([state.view for state in self._states if state.view is not None])
    return self._views

  def _make_view(self, state: RequestState) -> RequestView:
    prefetch = None if self._storage is None else self._storage.view(state)
    return view_builder.waiting_view(state, prefetch)

  def note(self, plan: StepPlan) -> None:
    """Counts the rounds of those who were deferred, postponed or passed over."""
    if not (plan.deferred or plan.postponed or plan.bypassed or plan.cancel_prefetch):
      return
    states = {state.request_id: state for state in self._states}
    for request_id in plan.cancel_prefetch:  # of those that were not admitted
      if self._storage is not None and (state := states.get(request_id)) is not None:
        self._storage.left(state)
        state.reads_storage = False
        self.changed(state)
    for deferred in plan.deferred:
      if (state := states.get(deferred.request_id)) is not None:
        self._defer(state, deferred)
        self.changed(state)
    for request_id in plan.postponed:
      if (state := states.get(request_id)) is not None:
        state.postponements += 1
        if state.front and not any(self._is_in_flight(node_id) for node_id in state.after):
          state.front, state.after, state.progress = False, (), None  # it has been considered
        self.changed(state)
    for request_id in plan.bypassed:
      if (state := states.get(request_id)) is not None:
        state.bypasses += 1
        self.changed(state)

  def _defer(self, state: RequestState, deferred: Deferred) -> None:
    """A deferral counts once it turns out that the producer made no progress since."""
    if state.progress is not None and self._progress(state.after) <= state.progress:
      state.deferrals += 1
    state.front = True
    state.after = deferred.waits_on
    state.progress = self._progress(deferred.waits_on)
    nodes = self._tiers.tree.nodes
    known = [nodes[node_id] for node_id in deferred.waits_on if node_id in nodes]
    if known:
      start, end = min(node.start for node in known), max(node.end for node in known)
      if state.delayed_end:
        start, end = min(start, state.delayed_start), max(end, state.delayed_end)
      state.delayed_start, state.delayed_end = start, end

  def _is_in_flight(self, node_id: int) -> bool:
    node = self._tiers.tree.nodes.get(node_id)
    return node is not None and node.state == "in_flight"

  def _progress(self, node_ids: Sequence[int]) -> int:
    """How far the nodes are computed, as a sum of prompt positions."""
    position = 0
    for node_id in node_ids:
      node = self._tiers.tree.nodes.get(node_id)
      if node is None:  # somebody waits for it, so it is not gone: it was computed, then joined
        return sys.maxsize
      if node.slots[DEVICE] is not None:
        position += node.end
      elif node.producers:
        producer = next(iter(node.producers))
        position += max(node.start, min(node.end, producer.context_tokens))
      else:
        position += node.start
    return position
