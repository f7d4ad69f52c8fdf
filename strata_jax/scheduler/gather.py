"""Stage gather: whether a few small prefills wait for others while decode goes on.

`(round) -> None`, once the plan is made. A pass that computes a handful of tokens takes about as
long as one with several times as many, since it reads all weights: passes that follow each other
closely are better one.
"""

from strata_jax.scheduler.round import Round


def at_once(round_: Round) -> None:
  """Whoever is ready computes."""


def small_prefills(round_: Round) -> None:
  """Holds back fewer than `gather_requests` until `gather_steps` decode steps after the last pass.

  Only those who would compute for less than a decode step takes: there is little to gain beside
  longer ones. Nobody is held who is urgent or prefills already, who loads beside its compute, whom
  others wait for, or whose room among the parked is given to others.
  """
  config, view = round_.config, round_.view
  if not round_.decode or round_.preempt or round_.deferred:
    return
  decoding = set(round_.decode)
  decoded = [request.decoded_steps for request in view.running if request.request_id in decoding]
  steps_left = config.gather_steps - min(decoded)
  if steps_left <= 0:
    return
  parked = set(round_.park)
  ready = [entry for entry in round_.entries if entry.request_id not in parked]
  count = len(ready) + len(round_.resume)
  if count >= config.gather_requests:
    return
  if count:
    waiting = {request.request_id: request for request in view.waiting}
    for request_id, loads, _, _ in ready:
      request = waiting.get(request_id)
      if loads or request is None or round_.is_urgent(request):
        return
    if _compute_s(round_, ready) >= view.costs.decode_step_s or not _may_stay(round_):
      return
    round_.hold_back([entry.request_id for entry in ready])
  round_.gather_steps_left = steps_left


def _may_stay(round_: Round) -> bool:
  """Whether the resumed can stay parked beside those who join: all of it is a step's work."""
  parked, budgets, joining = round_.view.parked, round_.view.budgets, set(round_.park)
  if parked is None or not round_.resume:
    return True
  tokens = sum(end - start for one, _, start, end in round_.entries if one in joining)
  return (
    len(parked.request_ids) + len(joining) <= budgets.batch_requests
    and parked.compute_tokens + tokens <= budgets.step_tokens
  )


def _compute_s(round_: Round, ready: list) -> float:
  """Predicted seconds that those who are ready compute for."""
  seconds = sum(round_.compute_s(start, end) for _, _, start, end in ready)
  resumed = set(round_.resume)
  for request in round_.view.running:
    if request.request_id in resumed:
      begin = request.context_tokens
      seconds += round_.compute_s(begin, begin + request.remaining_prefill_tokens)
  return seconds
