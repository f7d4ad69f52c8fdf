"""Builds the frozen views: only what changed since the last one is made anew."""

from collections.abc import Iterable

from strata_jax.controller.publishing import path_below
from strata_jax.controller.request_state import RequestState
from strata_jax.controller.tiers import CacheTiers
from strata_jax.radix_tree import DEVICE, Node
from strata_jax.scheduler.views import (
  ParkedView,
  PrefetchView,
  Producer,
  RequestView,
  RunningView,
  Span,
)


def waiting_view(state: RequestState, prefetch: PrefetchView | None = None) -> RequestView:
  """The view of a request that waits."""
  if state.tip is None:  # no cache
    path = (Span(-1, state.cap_tokens, "absent"),) if state.cap_tokens else ()
  else:
    path = _spans(state.tip.path())
  return RequestView(
    request_id=state.request_id,
    arrival_s=state.arrival_s,
    path=path,
    tail_tokens=state.prompt_tokens - state.cap_tokens,
    output_reserve_tokens=max(state.max_length - state.length - 1, 0),  # the last has no KV
    computed_tokens=state.computed_tokens,
    deferrals=state.deferrals,
    postponements=state.postponements,
    bypasses=state.bypasses,
    prefetch=prefetch,
    tenant=state.request.tenant,
    front=state.front,
    after=state.after,
  )


def running_view(state: RequestState, tiers: CacheTiers) -> RunningView:
  """The view of a request that holds device pages."""
  context = state.context_tokens
  left = state.max_length - state.length
  if state.phase == "decode":  # the common case: a view for every token
    return RunningView(
      request_id=state.request_id,
      phase="decode",
      arrival_s=state.arrival_s,
      context_tokens=context,
      next_pages=1 if context >= state.page_count * tiers.page_size else 0,
      output_tokens_left=left if left > 0 else 0,
      held_pages=_held_pages(state, tiers.page_size),
      tenant=state.request.tenant,
    )
  tail = state.prompt_tokens - max(state.cap_tokens, context)
  if state.tip is None or state.leaf is None:
    rest = state.cap_tokens - context
    path = (Span(-1, rest, "absent"),) if rest > 0 else ()
  else:
    path = _spans(path_below(state.tip, state.leaf))
  return RunningView(
    request_id=state.request_id,
    phase="parked" if state.phase == "parked" else "prefill",
    arrival_s=state.arrival_s,
    context_tokens=context,
    remaining_prefill_tokens=state.prompt_tokens - context,
    path=path,
    tail_tokens=tail,
    output_tokens_left=max(state.max_length - state.length, 0),
    held_pages=_held_pages(state, tiers.page_size),
    load_tokens_left=_load_tokens_left(state.load_ids, tiers) if state.phase == "parked" else None,
    tenant=state.request.tenant,
  )


def parked_view(running: Iterable[RequestState], tiers: CacheTiers) -> ParkedView | None:
  """The requests whose loads run while their compute waits."""
  parked = [state for state in running if state.phase == "parked"]
  if not parked:
    return None
  ids = {transfer_id for state in parked for transfer_id in state.load_ids}
  return ParkedView(
    request_ids=tuple(state.request_id for state in parked),
    load_tokens_left=_load_tokens_left(ids, tiers),
    compute_tokens=sum(state.chunk_end - state.chunk_start for state in parked),
  )


def in_flight_view(running: Iterable[RequestState]) -> dict[int, Producer]:
  """The nodes that running requests will compute, with the first of their producers."""
  nodes: dict[int, Producer] = {}
  for state in running:
    if state.phase == "decode" or state.tip is None or state.leaf is None:
      continue
    for node in path_below(state.tip, state.leaf):
      if node.state == "in_flight" and node.id not in nodes:
        producer = next(iter(node.producers))
        nodes[node.id] = Producer(producer.request_id, node.end - producer.context_tokens)
  return nodes


def loading_view(tiers: CacheTiers) -> dict[int, int]:
  """The nodes on their way from host to device, with their tokens."""
  return {
    node.id: len(node.tokens)
    for transfer in tiers.transfers.values()
    if transfer.tier == DEVICE
    for node in transfer.nodes
  }


def _spans(nodes: list[Node]) -> tuple[Span, ...]:
  return tuple([node.span or _span(node) for node in nodes])


def _span(node: Node) -> Span:
  span = Span(node.id, len(node.tokens), node.state, node.locks[DEVICE] > 0)
  node.span = span
  return span


def _load_tokens_left(transfer_ids: Iterable[int], tiers: CacheTiers) -> int:
  """Tokens of the transfers that have not come yet."""
  return sum(
    len(node.tokens)
    for transfer_id in set(transfer_ids) & tiers.transfers.keys()
    for node in tiers.transfers[transfer_id].nodes
  )


def _held_pages(state: RequestState, page_size: int) -> int:
  """Device pages that a preemption would release or make evictable."""
  leaf = state.leaf
  if leaf is None:
    return state.own_pages
  node: Node | None = leaf
  while node is not None and node.locks[DEVICE] == 1:  # locked for this request alone
    node = node.parent
  shared = 0 if node is None else node.end
  return state.own_pages + (leaf.end - shared) // page_size
