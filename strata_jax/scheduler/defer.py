"""Stage defer: whether a request should wait for what another is about to compute.

`(round, candidate) -> Deferred | None`. Strata, section on transient nodes: a request that matches
tokens being computed, or claimed by a request chosen before it in this round, by more than the
threshold, waits at the front instead of computing them a second time.
"""

from strata_jax.scheduler.round import Candidate, Round
from strata_jax.scheduler.views import Deferred


def delay_hits(round_: Round, candidate: Candidate) -> Deferred | None:
  """Defers a delay hit (rule 2): the run of in-flight or claimed spans exceeds the threshold."""
  spans = candidate.path[candidate.present :]
  if not spans:
    return None
  claims, in_flight = round_.claims, round_.view.in_flight
  run = 0
  claimed = False
  nodes: list[int] = []
  for node_id, tokens, state, _ in spans:
    if node_id in claims:
      claimed = True
    elif state != "in_flight" and node_id not in in_flight:
      if run:
        break
      continue
    run += tokens
    nodes.append(node_id)
  if run <= round_.config.deferral_threshold_tokens:
    return None
  reason = "claimed" if claimed else "in_flight"
  return Deferred(candidate.request_id, reason, tuple(nodes))


def never(round_: Round, candidate: Candidate) -> Deferred | None:
  """Nobody waits for another's computation."""
  return None
