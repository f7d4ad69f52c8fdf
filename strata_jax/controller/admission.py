"""Carries the prefill entries of a plan out: pins first, then pages, entry by entry.

All entries pin what they are going to read before anything is allocated, so that room for one is
not made by evicting the hit of another.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from strata_jax.controller.publishing import count_access, path_below, take_over, use_node
from strata_jax.controller.request_state import RequestState
from strata_jax.controller.results import Admission
from strata_jax.controller.tiers import CacheTiers
from strata_jax.executors.protocol import LoadWork, PrefillWork
from strata_jax.radix_tree import DEVICE, HOST, Node
from strata_jax.scheduler.views import Prefill


@dataclasses.dataclass(slots=True, eq=False)
class Pinned:
  """An entry that fits what is held, with the locks that keep it so."""

  state: RequestState
  start: int
  end: int
  loaded_from: int  # the entry's own loads cover [loaded_from, loaded_to) of the prompt
  loaded_to: int
  pins: list[tuple[Node, int]]  # (end of a path, tier)

  def release(self, tiers: CacheTiers) -> None:
    for node, tier in self.pins:
      tiers.tree.unlock(node, tier)
    self.pins.clear()


def malformed(state: RequestState, entry: Prefill, page_size: int) -> str | None:
  """What is wrong with an entry's positions, whatever the cache holds."""
  _, loads, start, end = entry
  prompt = state.prompt_tokens
  if not state.context_tokens <= start < end <= prompt:
    return f"a chunk in [{state.context_tokens}, {prompt}), got [{start}, {end})"
  if start > state.context_tokens and (start % page_size or start > state.cap_tokens):
    return f"compute_start at a whole page up to {state.cap_tokens}, got {start}"
  if end != prompt and end % page_size:
    return f"compute_end at a whole page or the prompt's end {prompt}, got {end}"
  if any(tokens < 1 or tokens % page_size for _, tokens in loads):
    return f"loads of whole pages, got {loads}"
  return None


def pin(
  tiers: CacheTiers, state: RequestState, entry: Prefill, will_load: set[Node]
) -> Pinned | None:
  """Finds what the entry reads and locks it; None if it is not there (any more).

  `will_load`: nodes that earlier entries of the plan load; this entry's are added.
  """
  start = entry.compute_start
  pinned = Pinned(state, start, entry.compute_end, start, start, [])
  if state.tip is None or state.leaf is None or start == state.context_tokens:
    return pinned if start == state.context_tokens and not entry.loads else None
  begin = state.leaf if state.phase != "waiting" else state.root
  assert begin is not None
  loads = dict(entry.loads)
  own: list[Node] = []
  device_end: Node | None = None
  for node in path_below(state.tip, begin):
    tokens = min(node.end, start) - node.start
    if tokens <= 0:
      break
    if node.slots[DEVICE] is not None:
      device_end = node
    elif node.id in loads:
      # Own loads follow each other up to compute_start, or others have loaded what comes between.
      if not node.ready(HOST) or loads.pop(node.id) != tokens or node in will_load:
        return None
      own.append(node)
    elif node not in will_load:
      return None
    if tokens < len(node.tokens):  # the step computes the rest of this node
      upper = tiers.tree.split(node, tokens)
      if node in will_load:
        will_load.add(upper)
      elif device_end is node:
        device_end = upper
      else:
        own[-1] = upper
      break
  if any(not _is_on_device(tiers, node_id) for node_id in loads):
    return None  # names a node that is not on the path, or not before compute_start
  if own:
    pinned.loaded_from, pinned.loaded_to = own[0].start, own[-1].end
    will_load.update(own)
    pinned.pins.append((own[-1], HOST))
    tiers.tree.lock(own[-1], HOST)
  if device_end is not None:
    pinned.pins.append((device_end, DEVICE))
    tiers.tree.lock(device_end, DEVICE)
  return pinned


Outcome = tuple[Admission | None, LoadWork | None]


def admit(tiers: CacheTiers, pinned: Pinned) -> Outcome | None:
  """Gives a waiting request its pages; None, with nothing changed, if it does not fit."""
  state, start, page_size = pinned.state, pinned.start, tiers.page_size
  nodes = state.tip.path() if state.tip is not None else []
  hit = [node for node in nodes if node.end <= start]
  missing = [node for node in hit if node.slots[DEVICE] is None]
  total = -(-state.prompt_tokens // page_size)
  first = start // page_size
  load_pages = sum(len(node.tokens) for node in missing) // page_size
  loadable = all(
    pinned.loaded_from <= node.start and node.end <= pinned.loaded_to for node in missing
  )
  if not loadable or not tiers.fits(load_pages + total - first):
    return None
  admission = _admission(state, hit, missing, start)
  slots = tiers.allocate(load_pages + total - first)
  if state.tip is not None:  # anew: making room may have split some of them
    hit = [node for node in state.tip.path() if node.end <= start]
    missing = [node for node in hit if node.slots[DEVICE] is None]
  load = None
  if missing:
    load = tiers.load(missing, slots[:load_pages], state.request_id)
  state.reserve_pages(total)
  state.page_count = first
  if hit:  # without a gap, up to `start`
    state.pages[:first] = np.concatenate([node.slots[DEVICE] for node in hit])
  state.add_own(slots[load_pages:])
  state.context_tokens = start
  state.leaf = hit[-1] if hit else state.root
  if state.leaf is not None:
    tiers.tree.lock(state.leaf, DEVICE)
    assert state.root is not None
    assert state.tip is not None
    for node in (state.root, *state.tip.path()):  # anew: making room may have split some
      node.waiters.discard(state)
    for node in path_below(state.tip, state.leaf):
      node.producers[state] = None
      tiers.tree.changed(node)
    state.load_ids = [t.transfer_id for node in hit if (t := node.transfers[DEVICE]) is not None]
    for node in list(hit):
      count_access(tiers, state, node)
    tiers.tree.touch(state.leaf)
  tiers.stats.admitted += 1
  tiers.stats.recomputed_tokens += max(state.computed_tokens - start, 0)
  return admission, load


def proceed(tiers: CacheTiers, pinned: Pinned) -> Outcome | None:
  """Brings a prefilling request to `compute_start` by what others have and what it loads.

  Loads go into the request's own pages. None if a load of an earlier entry is missing.
  """
  state, page_size = pinned.state, tiers.page_size
  if state.tip is None or state.leaf is None or pinned.start == state.context_tokens:
    return None, None
  nodes = [node for node in path_below(state.tip, state.leaf) if node.end <= pinned.start]
  missing = [node for node in nodes if node.slots[DEVICE] is None]
  if any(node.start < pinned.loaded_from or node.end > pinned.loaded_to for node in missing):
    return None
  load = None
  if missing:
    first, last = missing[0].start // page_size, missing[-1].end // page_size
    load = tiers.load(missing, state.give_up(first, last), state.request_id)
  for node in nodes:
    if (transfer := node.transfers[DEVICE]) is not None:
      state.load_ids.append(transfer.transfer_id)
    use_node(tiers, state, node)
  return None, load


def prefill_work(tiers: CacheTiers, state: RequestState) -> PrefillWork:
  """The chunk that a request computes now, once the loads that it reads have come."""
  start, end = state.chunk_start, state.chunk_end
  state.in_step = True
  state.load_ids = [i for i in dict.fromkeys(state.load_ids) if i in tiers.transfers]
  return PrefillWork(
    request_id=state.request_id,
    token_ids=state.tokens[start:end],
    start=start,
    page_table=state.pages[: -(-end // tiers.page_size)].copy(),
    samples=end == state.prompt_tokens,
    waits_for=tuple(state.load_ids),
  )


def leave_waiting(tiers: CacheTiers, state: RequestState) -> None:
  """Takes a waiting request out of the tree."""
  if state.tip is None or state.root is None:
    return
  for node in (state.root, *state.tip.path()):
    node.waiters.discard(state)
  tiers.tree.prune(state.tip)


def enter_waiting(tiers: CacheTiers, state: RequestState) -> None:
  """Puts a request's path into the tree, as far as pages of its prompt can be cached."""
  tree, page_size = tiers.tree, tiers.page_size
  state.phase = "waiting"
  state.cap_tokens = (state.prompt_tokens - 1) // page_size * page_size
  if state.root is None:
    return
  state.root = state.leaf = tree.root(state.request.salt, state.request.adapter)
  nodes = tree.extend(state.root, state.tokens, 0, state.cap_tokens)
  state.tip = nodes[-1] if nodes else state.root
  for node in (state.root, *nodes):
    node.waiters.add(state)
  tree.touch(state.tip)


def catch_up(tiers: CacheTiers, states: Iterable[RequestState]) -> None:
  """Lets prefilling requests take over what is on the device by now."""
  for state in states:
    if state.phase == "prefill" and not state.in_step:
      take_over(tiers, state, state.cap_tokens)


def _is_on_device(tiers: CacheTiers, node_id: int) -> bool:
  node = tiers.tree.nodes.get(node_id)
  return node is not None and node.slots[DEVICE] is not None


def _admission(state: RequestState, hit: list[Node], missing: list[Node], start: int) -> Admission:
  known = state.computed_tokens
  tokens = {DEVICE: 0, HOST: 0}
  stored = 0  # of the host's: what storage was read for while it waited
  for node in hit:
    tier = DEVICE if node.ready(DEVICE) else HOST
    tokens[tier] += max(node.end - max(node.start, known), 0) if known else len(node.tokens)
    if tier == HOST and state.prefetch is not None:
      begin, end = state.prefetch.begin, state.prefetch.next
      stored += max(min(node.end, end) - max(node.start, begin, known), 0)
  delayed = min(state.delayed_end, start) - max(state.delayed_start, known)
  return Admission(
    request_id=state.request_id,
    device_hit_tokens=tokens[DEVICE],
    host_hit_tokens=tokens[HOST] - stored,
    storage_hit_tokens=stored,
    delay_hit_tokens=max(delayed, 0),
    load_tokens=sum(len(node.tokens) for node in missing),
    compute_tokens=state.prompt_tokens - start,
    readmitted=state.admitted_before,
  )
