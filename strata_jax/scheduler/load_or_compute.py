"""Stage load_or_compute: how much of a host hit is loaded, and where computing starts.

`(round, candidate) -> (loads, start)`: `start` counts from the beginning of the candidate's path.
What the batch loads already is there for everybody. The choice is made per node and step (rule 7):
whole pages, the first k tokens of the hit are loaded and the rest is computed.
"""

from strata_jax.scheduler.round import Candidate, Round
from strata_jax.scheduler.views import Load

Choice = tuple[tuple[Load, ...], int]


def load_all(round_: Round, candidate: Candidate) -> Choice:
  """Loads the whole host hit, unless it is shorter than `min_load_tokens`."""
  if loads_whole_hit(round_, candidate):
    return whole_hit(candidate), candidate.hit_tokens
  loads: list[Load] = []
  start = total = 0
  unloaded_start = -1  # where computing starts without any load
  batch_loads = round_.loads
  for node_id, tokens, state, _ in candidate.path[: candidate.present]:
    if state == "host":
      shared = batch_loads.get(node_id)
      if shared is None:
        if not loads:
          unloaded_start = start
        loads.append(Load(node_id, tokens))
        total += tokens
      elif shared < tokens:  # the batch computes the rest of this node
        start += shared
        break
    start += tokens
  if loads and total < round_.config.min_load_tokens:
    return (), unloaded_start
  return tuple(loads), start


def loads_whole_hit(round_: Round, candidate: Candidate) -> bool:
  """Whether `load_all` is sure to load all host nodes of the hit, because the batch loads none.

  Paths of a tree that share any host node share the first one, where loading begins.
  """
  if not candidate.host_tokens:
    return True
  return candidate.first_host not in round_.loads and not round_.config.min_load_tokens


def whole_hit(candidate: Candidate) -> tuple[Load, ...]:
  """Loads of all host nodes of the hit."""
  if not candidate.host_tokens:
    return ()
  return tuple(
    [
      Load(node_id, tokens)
      for node_id, tokens, state, _ in candidate.path[: candidate.present]
      if state == "host"
    ]
  )


def load_none(round_: Round, candidate: Candidate) -> Choice:
  """Computes again whatever is not on the device, or loaded for another."""
  loads, start = load_all(round_, candidate)
  return _cut(candidate, loads, start, 0)


def load_cheaper(round_: Round, candidate: Candidate) -> Choice:
  """Loads the host hit if that takes fewer seconds than to compute it; else computes all of it."""
  loads, start = load_all(round_, candidate)
  costs = round_.view.costs
  if not loads or costs.load_s_per_token <= 0 or costs.compute_s_per_token <= 0:
    return loads, start
  total = sum(load.tokens for load in loads)
  load_s = costs.load_latency_s + total * costs.load_s_per_token
  begin = candidate.offset + start - total
  if load_s <= round_.compute_s(begin, begin + total):
    return loads, start
  return _cut(candidate, loads, start, 0)


def load_split(round_: Round, candidate: Candidate) -> Choice:
  """Loads the first k tokens and computes the rest, so that the batch is done soonest.

  With layer-wise overlap a batch takes max(load, compute) seconds, so k balances the two; without,
  their sum. No more is computed again than this step's token budget has room for.
  """
  loads, start = load_all(round_, candidate)
  costs, page = round_.view.costs, round_.page_size
  if not loads or costs.load_s_per_token <= 0 or costs.compute_s_per_token <= 0:
    return loads, start
  total = sum(load.tokens for load in loads)
  prompt = candidate.prompt_tokens - candidate.offset
  room = round_.tokens_left - (prompt - start)
  if room < page:
    return loads, start
  most = min(total, room) // page  # pages that could be computed again

  def seconds(recomputed: int) -> float:
    tokens = total - recomputed * page
    load_s = (round_.load_tokens + tokens) * costs.load_s_per_token
    if round_.load_tokens + tokens:
      load_s += costs.load_latency_s
    first = candidate.offset + start - recomputed * page
    own_s = round_.compute_s(first, candidate.prompt_tokens)
    compute_s = round_.compute_tokens * costs.compute_s_per_token + own_s
    return max(load_s, compute_s) if round_.config.layerwise else load_s + compute_s

  # Convex but for the latency, which falls away when nothing is loaded: that end is tried apart.
  low, high = 0, most
  while high - low > 1:
    middle = (low + high) // 2
    if seconds(middle) <= seconds(middle - 1):
      low = middle
    else:
      high = middle
  best = min((0, low, high, most), key=lambda pages: (seconds(pages), pages))
  return _cut(candidate, loads, start, total - best * page)


def _cut(candidate: Candidate, loads: tuple[Load, ...], start: int, keep: int) -> Choice:
  """Keeps the first `keep` tokens of the loads; computing starts behind them."""
  kept: list[Load] = []
  wanted = {load.node_id: load.tokens for load in loads}
  at = 0
  for node_id, tokens, _, _ in candidate.path[: candidate.present]:
    if at >= start:
      break
    if node_id in wanted:
      part = min(tokens, keep)
      if part:
        kept.append(Load(node_id, part))
      keep -= part
      if part < tokens:
        return tuple(kept), at + part
    at += tokens
  return tuple(kept), min(at, start)
