"""The state of one scheduling decision while it is made: what is left, taken, claimed and pinned.

A Round lives inside one call and never leaves it. Stages read it and add to it through `take`,
`defer`, `postpone` and `refuse`; `plan` turns it into the frozen answer.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from strata_jax.scheduler import views
from strata_jax.scheduler.config import PROFILED, SchedulerConfig

MISSING_ANYWAY = frozenset(("in_queue", "storage", "prefetching"))  # computing claims these
_DEFAULT_RATIO = 100.0


class Candidate:
  """Numbers of a waiting (or prefilling) request, computed once a view."""

  __slots__ = (
    "_prompt_tokens", "arrived", "first_host", "host_tokens", "loading_from", "offset", "path",
    "present", "request_id", "reserve_tokens", "resident_tokens", "tail_tokens",
  )  # fmt: skip

  def __init__(
    self,
    request_id: int,
    path: tuple[views.Span, ...],
    tail_tokens: int,
    arrived: int,
    offset: int = 0,
    reserve_tokens: int = 0,
  ) -> None:
    self.request_id = request_id
    self.path = path
    self.tail_tokens = tail_tokens
    self.arrived = arrived  # index in view.waiting; -1: it runs already
    self.offset = offset  # prompt position where `path` starts
    self.reserve_tokens = reserve_tokens
    present = resident = host = 0
    first_host, loading_from = -1, math.inf
    for node_id, tokens, state, _ in path:
      if state == "host":
        if not host:
          first_host = node_id
        host += tokens
      elif state == "device" or state == "loading":
        if state == "loading":
          loading_from = min(loading_from, resident + host)
        resident += tokens
      else:
        break
      present += 1
    self.present = present  # spans of the hit: the longest prefix on device, loading or on host
    self.resident_tokens = resident  # of the hit, on the device or loading
    self.host_tokens = host  # of the hit, on host
    self.first_host = first_host  # node where the host part of the hit begins; -1: none
    self.loading_from = loading_from  # where its first loading part begins; inf: none is

    self._prompt_tokens = -1

  @property
  def prompt_tokens(self) -> int:
    if self._prompt_tokens < 0:
      hit = self.offset + self.resident_tokens + self.host_tokens
      missing = sum([span[1] for span in self.path[self.present :]])
      self._prompt_tokens = hit + missing + self.tail_tokens
    return self._prompt_tokens

  @property
  def hit_tokens(self) -> int:
    return self.resident_tokens + self.host_tokens


class Offer(NamedTuple):
  """How a request would run in this step."""

  entry: views.Prefill
  load_tokens: int  # beyond what the batch loads already
  compute_tokens: int  # in this step
  new_pages: int
  pins: tuple[int, ...]  # device nodes that it takes out of the evictable room
  pinned_pages: int
  uses_loads: bool  # reads pages that this plan loads, or (join_loading) that are loading
  later: bool = False  # joins the parked: its compute is for another step


class Round:
  """One decision. Public attributes may be read by any stage."""

  def __init__(self, view: views.SchedulerView, config: SchedulerConfig) -> None:
    self.view = view
    self.config = config
    self.page_size = view.budgets.page_size
    self.tokens_left = view.budgets.step_tokens
    self.requests_left = view.budgets.batch_requests
    self.later_tokens_left = 0  # budgets of those that join the parked
    self.later_requests_left = 0
    self.loads_wait = False  # whoever needs loads joins the parked
    self.window_tokens = math.inf  # while this plan loads less
    self.slots_left = view.budgets.running_requests - len(view.running)
    self.pages_left = view.free_pages + view.evictable_pages
    self.load_tokens = 0
    self.compute_tokens = 0
    self.load_weight = 0.0  # what the load ratio is made of: tokens or seconds
    self.compute_weight = 0.0
    self.loads: dict[int, int] = {}  # node id -> tokens this plan loads
    self.claims: set[int] = set()  # nodes that chosen requests will compute
    self.pinned: set[int] = set()
    self.entries: list[views.Prefill] = []
    self.new_offers: list[Offer] = []  # of requests admitted in this round
    self.chosen: set[int] = set()  # request ids
    self.bundled: list[int] = []
    self.deferred: dict[int, views.Deferred] = {}
    self.postponed: list[int] = []
    self.refused: dict[int, views.Refused] = {}
    self.cancel_prefetch: list[int] = []
    self.held: set[int] = set()  # wait for their prefetch
    self.park: tuple[int, ...] = ()
    self.resume: tuple[int, ...] = ()
    self.decode: tuple[int, ...] = ()
    self.decode_steps = 1
    self.preempt: tuple[int, ...] = ()
    self.wake_at_s: float | None = None
    self.cut: Candidate | None = None  # prefills already; its chunk ended for want of tokens
    self.window_waits: set[int] = set()  # need loads, and the window of rolling loads is full
    self.loads_closed = False  # an urgent one is among them: nobody else loads
    self.closed = False  # nobody else is admitted in this round
    self._last_arrived = -1
    self._last_loading = -1
    self._candidates: dict[int, Candidate] = {}
    self._by_seconds = (
      config.balance_by == "predicted_seconds"
      and view.costs.load_s_per_token > 0
      and view.costs.compute_s_per_token > 0
    )
    self.ratio_limit = self._ratio_limit()

  def candidate(self, index: int) -> Candidate:
    """The numbers of `view.waiting[index]`."""
    found = self._candidates.get(index)
    if found is None:
      request = self.view.waiting[index]
      found = self._candidates[index] = Candidate(
        request.request_id, request.path, request.tail_tokens, index, 0,
        request.output_reserve_tokens,
      )  # fmt: skip
    return found

  def is_urgent(self, request: views.RequestView) -> bool:
    """Whether a limit of rule 8 is reached: never deferred or postponed, first in line."""
    config = self.config
    return (
      request.bypasses >= config.max_bypasses
      or request.deferrals >= config.max_deferrals
      or request.postponements >= config.max_postponements
    )

  @property
  def full(self) -> bool:
    """Rule 5: a budget is used up. (Pages are judged request by request.)"""
    return self.closed or self.tokens_left <= 0 or self.requests_left <= 0 or self.slots_left <= 0

  @property
  def parks(self) -> bool:
    """Whether loading-bound requests are parked at all."""
    return self.config.bubble_filling and self.ratio_limit != math.inf

  # Load ratio

  def weigh(self, offer: Offer) -> tuple[float, float]:
    """The offer's part of the load ratio: (loads, computes), in tokens or predicted seconds."""
    if not self._by_seconds:
      return offer.load_tokens, offer.compute_tokens
    costs, (_, _, start, end) = self.view.costs, offer.entry
    return offer.load_tokens * costs.load_s_per_token, self.compute_s(start, end)

  def compute_s(self, start: int, end: int) -> float:
    """Predicted seconds to compute prompt positions [start, end)."""
    costs, tokens = self.view.costs, end - start
    context = start + tokens / 2
    return tokens * (costs.compute_s_per_token + costs.compute_s_per_token_context * context)

  def loading_bound(self, load_weight: float, compute_weight: float) -> bool:
    return load_weight > self.ratio_limit * max(compute_weight, 1e-12)

  def _ratio_limit(self) -> float:
    if self._by_seconds:
      return self.config.seconds_threshold
    limit = self.config.ratio_threshold
    if limit == PROFILED:
      costs = self.view.costs
      if not (costs.load_s_per_token > 0 and costs.compute_s_per_token > 0):
        return _DEFAULT_RATIO
      return costs.compute_s_per_token / costs.load_s_per_token
    return float(limit)

  # Decisions

  def take(self, candidate: Candidate, offer: Offer) -> None:
    """Chooses a request: its claims, loads, pages and pins count from now on (rules 1 and 4)."""
    entry = offer.entry
    self.entries.append(entry)
    self.chosen.add(entry.request_id)
    if offer.later:
      self.later_tokens_left -= offer.compute_tokens
      self.later_requests_left -= 1
      self.park = (*self.park, entry.request_id)
    else:
      self.tokens_left -= offer.compute_tokens
      self.requests_left -= 1
    load_weight, compute_weight = self.weigh(offer)
    self.load_weight += load_weight
    self.compute_weight += compute_weight
    self.load_tokens += offer.load_tokens
    self.compute_tokens += offer.compute_tokens
    for node_id, tokens in entry.loads:
      self.loads[node_id] = tokens
    if candidate.arrived < 0:
      return
    self.slots_left -= 1
    self.pages_left -= offer.new_pages + offer.pinned_pages
    self.pinned.update(offer.pins)
    self.new_offers.append(offer)
    self._last_arrived = max(self._last_arrived, candidate.arrived)
    if offer.load_tokens:
      self._last_loading = max(self._last_loading, candidate.arrived)
    path = candidate.path
    for span in path[candidate.present :]:
      if span[2] in MISSING_ANYWAY:
        self.claims.add(span[0])
    prefetch = self.view.waiting[candidate.arrived].prefetch
    if prefetch is not None and prefetch.arrived_tokens < prefetch.expected_tokens:
      self.cancel_prefetch.append(candidate.request_id)

  def defer(self, candidate: Candidate, deferred: views.Deferred) -> None:
    """Lets a request wait at the front; what it would hit stays (rule 2)."""
    self.deferred[candidate.request_id] = deferred
    pins, pages = self.unpinned(candidate, candidate.hit_tokens)
    self.pinned.update(pins)
    self.pages_left -= pages

  def unpinned(self, candidate: Candidate, end: int) -> tuple[tuple[int, ...], int]:
    """Evictable device nodes of the hit before `end` that nothing pins yet, and their pages."""
    pins, pages, at = [], 0, 0
    for span in candidate.path[: candidate.present]:
      if at >= end:
        break
      node_id, tokens, state, locked = span
      if state == "device" and not locked and node_id not in self.pinned:
        pins.append(node_id)
        pages += tokens // self.page_size
      at += tokens
    return tuple(pins), pages

  def plan(self) -> views.StepPlan:
    """The frozen answer."""
    return views.StepPlan(
      version=self.view.version,
      prefill=tuple(self.entries),
      park=self.park,
      resume=self.resume,
      decode=self.decode,
      decode_steps=self.decode_steps,
      preempt=self.preempt,
      cancel_prefetch=tuple(self.cancel_prefetch),
      deferred=tuple(self.deferred.values()),
      postponed=tuple(self.postponed),
      bypassed=self._bypassed(),
      bundled=tuple(self.bundled),
      refused=tuple(self.refused.values()),
      wake_at_s=self.wake_at_s,
    )

  def _bypassed(self) -> tuple[int, ...]:
    """Who was passed over: a later arrival was admitted, and nothing else counts this round.

    For those who wait for the window of rolling loads only a later arrival that loads counts.
    """
    if self._last_arrived < 1:
      return ()
    counted = self.chosen | self.deferred.keys() | self.held
    counted.update(self.postponed, self.refused)
    waits, last_loading = self.window_waits, self._last_loading
    earlier: Sequence[views.RequestView] = self.view.waiting[: self._last_arrived]
    return tuple(
      [
        r.request_id
        for index, r in enumerate(earlier)
        if r.request_id not in counted and (r.request_id not in waits or index < last_loading)
      ]
    )


def pages_of(tokens: int, page_size: int) -> int:
  """Whole pages that hold `tokens`."""
  return -(-tokens // page_size)


def reserve_pages(round_: Round) -> int:
  """Pages kept for the outputs of running requests, beyond those they decode into now."""
  cap, page_size = round_.config.running_reserve_tokens, round_.page_size
  return sum(
    max(0, pages_of(min(r.output_tokens_left, cap), page_size) - r.next_pages)
    for r in round_.view.running
    if r.output_tokens_left
  )
