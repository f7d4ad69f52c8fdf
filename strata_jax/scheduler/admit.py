"""Stage admit: whether a request fits into this step, and how it would run.

`(round, candidate, load_or_compute) -> Offer | None`. Pages: at its first chunk a request gets room
for its whole prompt, loads included, and its output reserve; each node counts once (rule 4).
"""

from collections.abc import Callable

from strata_jax.scheduler.load_or_compute import Choice
from strata_jax.scheduler.round import Candidate, Offer, Round, pages_of
from strata_jax.scheduler.views import Prefill, Refused

LoadOrCompute = Callable[[Round, Candidate], Choice]


def admit(round_: Round, candidate: Candidate, load_or_compute: LoadOrCompute) -> Offer | None:
  """The offer for a waiting request, None when it does not fit now."""
  if round_.full:
    return None
  loads, start = load_or_compute(round_, candidate)
  end = chunk_end(candidate, start, round_)
  if end is None:
    return None
  page_size = round_.page_size
  new_pages = pages_of(
    candidate.prompt_tokens + candidate.reserve_tokens - _there(round_, candidate, start, loads),
    page_size,
  )
  if new_pages > round_.pages_left:
    return None
  pins, pinned_pages = round_.unpinned(candidate, start)
  if new_pages + pinned_pages > round_.pages_left:
    return None
  return _offer(round_, candidate, loads, start, end, new_pages, pins, pinned_pages)


def proceed(round_: Round, candidate: Candidate, load_or_compute: LoadOrCompute) -> Offer | None:
  """The next chunk of a request that prefills: its pages are its own already."""
  if round_.tokens_left <= 0 or round_.requests_left <= 0:
    return None
  loads, start = load_or_compute(round_, candidate)
  end = chunk_end(candidate, start, round_)
  return None if end is None else _offer(round_, candidate, loads, start, end, 0, (), 0)


def refuse_impossible(round_: Round, candidate: Candidate) -> bool:
  """Refuses a request that the whole device pool could not hold; says whether it did."""
  capacity = round_.view.capacity_pages
  pages = pages_of(candidate.prompt_tokens + candidate.reserve_tokens, round_.page_size)
  if not capacity or pages <= capacity:
    return False
  reason = f"needs {pages} device pages of {capacity}"
  round_.refused.append(Refused(candidate.request_id, reason))
  return True


def chunk_end(candidate: Candidate, start: int, round_: Round) -> int | None:
  """Where the chunk from `start` (in the path) ends, as a prompt position; None: no room."""
  begin = candidate.offset + start
  end = begin + round_.tokens_left
  if end >= candidate.prompt_tokens:
    return candidate.prompt_tokens
  end -= end % round_.page_size
  return end if end > begin else None


def _there(round_: Round, candidate: Candidate, start: int, loads: tuple[object, ...]) -> int:
  """Tokens before `start` whose pages need no room of this request."""
  if not round_.loads and not loads:
    return start
  there = at = 0
  for node_id, tokens, state, _ in candidate.path[: candidate.present]:
    if at >= start:
      break
    if state != "host":
      there += tokens
    elif node_id in round_.loads:
      there += min(round_.loads[node_id], tokens)
    at += tokens
  return there


def _offer(
  round_: Round,
  candidate: Candidate,
  loads: tuple,
  start: int,
  end: int,
  new_pages: int,
  pins: tuple[int, ...],
  pinned_pages: int,
) -> Offer:
  begin = candidate.offset + start
  uses_loads = bool(loads)
  if not uses_loads and round_.loads and candidate.host_tokens:
    uses_loads = any(span[0] in round_.loads for span in candidate.path[: candidate.present])
  return Offer(
    entry=Prefill(candidate.request_id, loads, begin, end),
    load_tokens=sum(load[1] for load in loads),
    compute_tokens=end - begin,
    new_pages=new_pages,
    pins=pins,
    pinned_pages=pinned_pages,
    uses_loads=uses_loads,
  )
