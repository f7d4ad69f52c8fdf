"""Stage admit: whether a request fits into this step, and how it would run.

`(round, candidate, load_or_compute) -> Offer | None`. Pages: at its first chunk a request gets room
for its whole prompt, loads included, and its output reserve; each node counts once (rule 4).
"""

from collections.abc import Callable

from strata_jax.scheduler.load_or_compute import Choice, load_all, loads_whole_hit, whole_hit
from strata_jax.scheduler.round import Candidate, Offer, Round, pages_of
from strata_jax.scheduler.views import Prefill, Refused

LoadOrCompute = Callable[[Round, Candidate], Choice]


def admit(round_: Round, candidate: Candidate, load_or_compute: LoadOrCompute) -> Offer | None:
  """The offer for a waiting request, None when it does not fit now."""
  if round_.full:
    return None
  whole = load_or_compute is load_all and loads_whole_hit(round_, candidate)
  if whole:  # who does not fit needs no list of loads
    loads, start, load_tokens = (), candidate.hit_tokens, candidate.host_tokens
  else:
    loads, start = load_or_compute(round_, candidate)
    load_tokens = sum([load[1] for load in loads]) if loads else 0
  uses_loads = load_tokens > 0 or start > candidate.resident_tokens
  if round_.config.join_loading and start > candidate.loading_from:
    uses_loads = True
  later = uses_loads and round_.loads_wait
  if later:
    tokens_left, requests_left = round_.later_tokens_left, round_.later_requests_left
    if load_tokens and (round_.loads_closed or round_.load_tokens >= round_.window_tokens):
      requests_left = 0
  else:
    tokens_left, requests_left = round_.tokens_left, round_.requests_left
  end = chunk_end(candidate, start, tokens_left, round_.page_size)
  if end is None or requests_left <= 0:
    if later:
      round_.window_waits.add(candidate.request_id)
    return None
  # All before `start` is there but its own loads.
  there = start - load_tokens
  new_pages = pages_of(candidate.prompt_tokens + candidate.reserve_tokens - there, round_.page_size)
  if new_pages > round_.pages_left:
    return None
  pins, pinned_pages = round_.unpinned(candidate, start)
  if new_pages + pinned_pages > round_.pages_left:
    return None
  return Offer(
    Prefill(candidate.request_id, whole_hit(candidate) if whole else loads, start, end),
    load_tokens,
    end - start,
    new_pages,
    pins,
    pinned_pages,
    uses_loads,
    later,
  )


def proceed(round_: Round, candidate: Candidate, load_or_compute: LoadOrCompute) -> Offer | None:
  """The next chunk of a request that prefills: its pages are its own already."""
  if round_.tokens_left <= 0 or round_.requests_left <= 0:
    return None
  loads, start = load_or_compute(round_, candidate)
  end = chunk_end(candidate, start, round_.tokens_left, round_.page_size)
  if end is None:
    return None
  begin = candidate.offset + start
  load_tokens = sum([load[1] for load in loads])
  entry = Prefill(candidate.request_id, loads, begin, end)
  return Offer(entry, load_tokens, end - begin, 0, (), 0, load_tokens > 0)


def refuse_impossible(round_: Round, candidate: Candidate) -> bool:
  """Refuses a request that the whole device pool could not hold; says whether it did."""
  capacity = round_.view.capacity_pages
  tokens = candidate.prompt_tokens + candidate.reserve_tokens
  if not capacity or tokens <= capacity * round_.page_size:
    return False
  pages = pages_of(tokens, round_.page_size)
  reason = f"needs {pages} device pages of {capacity}"
  round_.refused[candidate.request_id] = Refused(candidate.request_id, reason)
  return True


def chunk_end(candidate: Candidate, start: int, tokens_left: int, page_size: int) -> int | None:
  """Where the chunk from `start` (in the path) ends, as a prompt position; None: no room."""
  begin = candidate.offset + start
  end = begin + max(0, tokens_left)
  if end >= candidate.prompt_tokens:
    return candidate.prompt_tokens
  end -= end % page_size
  return end if end > begin else None
