"""Stage fill_bubble: what to do with a batch that is still loading-bound.

`(round) -> None`, after the batch is formed. Strata, section on bubbles: start its loads and run
decode steps meanwhile; its compute starts when the rest of the load no longer bounds it.
"""

import math

from strata_jax.scheduler.round import Round


def with_decode(round_: Round) -> None:
  """Parks the new requests that need loads, if the batch is loading-bound and others decode."""
  if not round_.decode or not round_.new_offers or not round_.load_tokens:
    return
  if round_.view.parked is not None and not round_.resume:
    return
  if round_.loading_bound(round_.load_weight, round_.compute_weight):
    round_.park = tuple(offer.entry.request_id for offer in round_.new_offers if offer.uses_loads)


def leave(round_: Round) -> None:
  """The batch waits for its loads."""


def may_resume(round_: Round) -> bool:
  """Whether the parked batch should compute now: its load is done, or no longer bounds it."""
  parked = round_.view.parked
  if parked is None:
    return False
  config = round_.config
  if parked.load_tokens_left <= 0 or not round_.decode or not config.bubble_filling:
    return True
  if round_.ratio_limit == math.inf:  # nothing is loading-bound
    return True
  if not config.layerwise:
    return False
  if config.balance_by == "predicted_seconds":
    costs = round_.view.costs
    return not round_.loading_bound(
      parked.load_tokens_left * costs.load_s_per_token,
      parked.compute_tokens * costs.compute_s_per_token,
    )
  return not round_.loading_bound(parked.load_tokens_left, parked.compute_tokens)
