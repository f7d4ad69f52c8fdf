"""Stage form_batch: which of the waiting requests join this step's batch.

`(round, line, try_admit) -> None`: `line` holds indices into `view.waiting`; `try_admit(candidate)`
passes the deferral test with the claims as they stand (rule 1), then capacity, and answers an offer
or None; `round.take` chooses.
"""

from collections.abc import Callable, Sequence

from strata_jax.scheduler.round import Candidate, Offer, Round

TryAdmit = Callable[[Candidate], Offer | None]


def in_order(round_: Round, line: Sequence[int], try_admit: TryAdmit) -> None:
  """Takes whoever fits, in order."""
  for index in line:
    if round_.full:
      return
    candidate = round_.candidate(index)
    offer = try_admit(candidate)
    if offer is not None:
      round_.take(candidate, offer)


def balanced(round_: Round, line: Sequence[int], try_admit: TryAdmit) -> None:
  """Strata's batch: the head with its bundle hits, a walk under the load ratio, then a refill.

  A request is postponed if the batch would be loading-bound with it and the request is so by
  itself: one that computes enough for its own loads only improves a batch.
  """
  config = round_.config
  batch = _Batch(round_, line, try_admit)
  postponed: list[int] = []
  urgent: list[int] = []  # whose bundle hits wait until all urgent requests had their turn
  for index in line:
    if round_.full:
      break
    if urgent and not round_.is_urgent(round_.view.waiting[index]):
      for chosen in urgent:
        batch.bundle(chosen)
      urgent.clear()
      if round_.full:
        break
    if index in batch.done:
      continue
    candidate = round_.candidate(index)
    offer = try_admit(candidate)
    if offer is None:
      batch.done.add(index)
    elif batch.joins(offer, index):
      batch.take(index, offer)
      if round_.is_urgent(round_.view.waiting[index]):
        urgent.append(index)
      else:
        batch.bundle(index)
    else:
      postponed.append(index)
  for chosen in urgent:
    batch.bundle(chosen)
  if config.refill:
    for index in postponed:
      if round_.full:
        break
      if index in batch.done:
        continue
      candidate = round_.candidate(index)
      offer = try_admit(candidate)
      if offer is not None:
        batch.take(index, offer)
        batch.bundle(index)
  round_.postponed.extend(
    request_id
    for index in postponed
    if (request_id := round_.view.waiting[index].request_id) not in round_.chosen
    and request_id not in round_.deferred
    and request_id not in round_.window_waits
  )


class _Batch:
  """The batch while it is formed, with an index of who shares which host node."""

  def __init__(self, round_: Round, line: Sequence[int], try_admit: TryAdmit) -> None:
    self._round = round_
    self._line = line
    self._try_admit = try_admit
    self._sharers: dict[int, list[int]] | None = None
    self._loads: dict[int, bool] = {}  # of the chosen: whether it loads anything
    self.done: set[int] = set()  # chosen, deferred or found not to fit

  def joins(self, offer: Offer, index: int) -> bool:
    round_ = self._round
    if not round_.config.balance or not offer.load_tokens or not round_.new_offers:
      return True  # the head of the queue is always taken
    if round_.is_urgent(round_.view.waiting[index]):
      return True
    load, compute = round_.weigh(offer)
    return not (
      round_.loading_bound(round_.load_weight + load, round_.compute_weight + compute)
      and round_.loading_bound(load, compute)
    )

  def take(self, index: int, offer: Offer) -> None:
    self.done.add(index)
    self._loads[index] = bool(offer.entry.loads)
    self._round.take(self._round.candidate(index), offer)

  def bundle(self, index: int) -> None:
    """Takes those that share what the chosen request loads (rule 3)."""
    round_, config = self._round, self._round.config
    if not config.bundles or not self._loads[index]:
      return
    chosen, loads = round_.candidate(index), round_.loads
    for other in self._sharing(chosen):
      if round_.full:
        return
      if other in self.done:
        continue
      candidate = round_.candidate(other)
      shared = 0
      for node_id, tokens, state, _ in candidate.path[: candidate.present]:
        if state == "host":
          loaded = loads.get(node_id)
          if loaded is None:
            break
          shared += min(tokens, loaded)
      # What it must load beyond the batch's loads, however much of that it would compute instead.
      extra = candidate.host_tokens - shared
      if shared < config.bundle_min_shared_tokens or extra > config.bundle_slack_tokens:
        continue
      joined = self._try_admit(candidate)
      if joined is None:
        if candidate.request_id in round_.deferred:
          self.done.add(other)
        continue
      self.done.add(other)
      round_.take(candidate, joined)
      round_.bundled.append(candidate.request_id)

  def _sharing(self, candidate: Candidate) -> list[int]:
    """Members of the line that share loads with the candidate, in the order of the line.

    Paths of a tree that share any host node share the first one, where loading begins.
    """
    if self._sharers is None:
      sharers: dict[int, list[int]] = {}
      waiting = self._round.view.waiting
      for index in self._line:
        for node_id, _, state, _ in waiting[index].path:
          if state == "host":
            sharers.setdefault(node_id, []).append(index)
            break
          if state != "device" and state != "loading":
            break
      self._sharers = sharers
    return self._sharers[candidate.first_host]
