"""Stage order: in which order waiting requests are considered.

`(round, ready) -> ready, sorted`; both are indices into `view.waiting`. Whatever the stage answers,
`in_line` puts urgent requests first and those that were deferred next, each in arrival order.
"""

import collections
from collections.abc import Sequence

from strata_jax.scheduler.round import Round
from strata_jax.scheduler.views import PrefetchView


def arrival(round_: Round, ready: Sequence[int]) -> list[int]:
  """First come, first served."""
  return list(ready)


def longest_prefix(round_: Round, ready: Sequence[int]) -> list[int]:
  """Most hit tokens first, device and host; ties by arrival."""
  if len(ready) > round_.config.order_max_waiting:
    return list(ready)
  return sorted(ready, key=lambda index: -round_.candidate(index).hit_tokens)


def shortest_load(round_: Round, ready: Sequence[int]) -> list[int]:
  """Fewest tokens to load first; ties by arrival."""
  if len(ready) > round_.config.order_max_waiting:
    return list(ready)
  return sorted(ready, key=lambda index: round_.candidate(index).host_tokens)


def most_shared(round_: Round, ready: Sequence[int]) -> list[int]:
  """Who loads nothing first, then loads that most of the waiting share; ties by arrival.

  A context on the device then serves several requests while it is there: device pages, rather than
  the link, are what many short questions about long contexts run out of.
  """
  if len(ready) > round_.config.order_max_waiting:
    return list(ready)
  firsts = {index: round_.candidate(index).first_host for index in ready}  # -1: loads nothing
  # Paths of a tree that share any host node share the first one.
  sharers = collections.Counter(firsts.values())
  sharers[-1] = len(ready) + 1
  return sorted(ready, key=lambda index: -sharers[firsts[index]])


def later_twins_last(round_: Round, ready: Sequence[int]) -> list[int]:
  """In-queue de-duplication as SGLang does it, to compare deferral with.

  A request with at most `dedup_check_tokens` cached tokens that shares at least
  `dedup_shared_tokens` uncached ones with an earlier such request goes to the end of the line.
  """
  config = round_.config
  if len(ready) > config.dedup_max_waiting:
    return list(ready)
  seen: set[int] = set()
  firsts: list[int] = []
  twins: list[int] = []
  for index in ready:
    candidate = round_.candidate(index)
    if candidate.hit_tokens > config.dedup_check_tokens:
      firsts.append(index)
      continue
    missing = candidate.path[candidate.present :]
    shared = candidate.hit_tokens
    for span in missing:
      if span.node_id not in seen:
        break
      shared += span.tokens
    if shared > candidate.hit_tokens and shared >= config.dedup_shared_tokens:
      twins.append(index)
    else:
      firsts.append(index)
      seen.update(span.node_id for span in missing if span.node_id >= 0)
  return firsts + twins


def ready(round_: Round) -> list[int]:
  """Who may be chosen: not those that `prefetch` lets wait for storage.

  best_effort takes everybody, wait_complete waits for the whole prefetch, timeout until its
  deadline, cost as long as reading the rest is expected to take less time than computing it, and
  not beyond the deadline. The earliest deadline becomes the plan's `wake_at_s`.
  """
  view, policy = round_.view, round_.config.prefetch
  if policy == "best_effort":
    return list(range(len(view.waiting)))
  found: list[int] = []
  for index, request in enumerate(view.waiting):
    prefetch = request.prefetch
    if prefetch is None or prefetch.arrived_tokens >= prefetch.expected_tokens:
      found.append(index)
      continue
    if policy == "cost" and not _reads_sooner(round_, index, prefetch):
      found.append(index)
      continue
    if policy in ("timeout", "cost") and prefetch.deadline_s is not None:
      if prefetch.deadline_s <= view.now_s:
        found.append(index)
        continue
      wake = round_.wake_at_s
      round_.wake_at_s = prefetch.deadline_s if wake is None else min(wake, prefetch.deadline_s)
    round_.held.add(request.request_id)
  return found


def _reads_sooner(round_: Round, index: int, prefetch: PrefetchView) -> bool:
  """Whether the rest of a prefetch is read sooner than computed. Unknown costs: no."""
  costs = round_.view.costs
  if costs.prefetch_s_per_token <= 0 or costs.compute_s_per_token <= 0:
    return False
  left = prefetch.expected_tokens - prefetch.arrived_tokens
  start = round_.candidate(index).hit_tokens
  return left * costs.prefetch_s_per_token < round_.compute_s(start, start + left)


def in_line(round_: Round, found: Sequence[int], ordered: Sequence[int]) -> list[int]:
  """Urgent requests, then the front, then `ordered`; the first two in arrival order (rule 8)."""
  waiting, config = round_.view.waiting, round_.config
  bypasses, deferrals = config.max_bypasses, config.max_deferrals
  postponements = config.max_postponements
  urgent: list[int] = []
  front: list[int] = []
  for index in found:
    request = waiting[index]
    if (
      request.bypasses >= bypasses
      or request.deferrals >= deferrals
      or request.postponements >= postponements
    ):
      urgent.append(index)
    elif request.front:
      front.append(index)
  if not urgent and not front:
    return list(ordered)
  return list(dict.fromkeys((*urgent, *front, *ordered)))
