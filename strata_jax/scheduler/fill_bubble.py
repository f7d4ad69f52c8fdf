"""Stage fill_bubble: what to do with a batch that is still loading-bound.

`(round) -> None`, after the batch is formed. Strata, section on bubbles: start its loads and run
decode steps meanwhile; its compute starts when the rest of the load no longer bounds it.

The published rule parks one batch and resumes it as a whole. With `rolling_loads` the parked are a
window on the link: each resumes when its own loads have come and others join at once, so that the
link does not idle between two batches.
"""

from collections.abc import Sequence

from strata_jax.scheduler.round import Round
from strata_jax.scheduler.views import ParkedView, RunningView


def with_decode(round_: Round) -> None:
  """Parks the new requests that need loads, if the batch is loading-bound and others decode."""
  if round_.park or not round_.decode or not round_.new_offers or not round_.load_tokens:
    return
  if round_.view.parked is not None and not round_.resume:
    return
  if round_.loading_bound(round_.load_weight, round_.compute_weight):
    round_.park = tuple(offer.entry.request_id for offer in round_.new_offers if offer.uses_loads)


def leave(round_: Round) -> None:
  """The batch waits for its loads."""


def resumable(round_: Round, parked: Sequence[RunningView]) -> Sequence[RunningView]:
  """Which of the parked should compute now.

  With rolling loads those whose own loads have come; if nothing else can run, the first, whose load
  comes next. As a batch: all of them once their loads no longer bound them.
  """
  config, view = round_.config, round_.view
  if view.parked is None or view.parked.load_tokens_left <= 0 or not round_.parks:
    return parked
  known = all(request.load_tokens_left is not None for request in parked)
  if not config.rolling_loads or not known:
    return parked if _unbound(round_, view.parked) or not round_.decode else ()
  load_s_per_token = view.costs.load_s_per_token
  soon = 0.0  # tokens that come within the next decode step anyway
  if config.layerwise and load_s_per_token > 0:
    soon = view.costs.decode_step_s / load_s_per_token
  if view.parked.load_tokens_left <= soon:
    return parked
  done = [request for request in parked if not request.load_tokens_left]
  return done if done or round_.decode else parked[:1]


def _unbound(round_: Round, parked: ParkedView) -> bool:
  """Whether what is left of the batch's loads no longer bounds it."""
  if not round_.config.layerwise:
    return False
  if round_.config.balance_by == "predicted_seconds":
    costs = round_.view.costs
    return not round_.loading_bound(
      parked.load_tokens_left * costs.load_s_per_token,
      parked.compute_tokens * costs.compute_s_per_token,
    )
  return not round_.loading_bound(parked.load_tokens_left, parked.compute_tokens)
