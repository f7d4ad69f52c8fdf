"""What runs already goes on: decode steps, preemption when pages run out, the next chunks.

Running requests come first: decodes take their next pages, then the parked batch resumes, then
prompts continue in admission order, each consulting the cache for its next chunk.
"""

from strata_jax.scheduler.admit import LoadOrCompute, proceed
from strata_jax.scheduler.round import Candidate, Round, reserve_pages
from strata_jax.scheduler.views import RunningView


def decode_all(round_: Round) -> None:
  """Decodes everybody; preempts the youngest until the next pages of the others fit.

  Parked requests are not preempted (their loads are under way), nor is the oldest. A decode that
  still finds no page waits for the next step. A round that preempts admits nobody.
  """
  running = round_.view.running
  decoding = [r for r in running if r.phase == "decode"]
  needed = sum(r.next_pages for r in decoding)
  preempted: list[int] = []
  if needed > round_.pages_left:
    oldest = running[0].request_id
    for victim in reversed(running):
      if needed <= round_.pages_left or victim.request_id == oldest:
        break
      if victim.phase == "parked":
        continue
      preempted.append(victim.request_id)
      round_.pages_left += victim.held_pages
      if victim.phase == "decode":
        decoding.remove(victim)
        needed -= victim.next_pages
  kept: list[RunningView] = []
  for request in decoding:
    if request.next_pages <= round_.pages_left:
      round_.pages_left -= request.next_pages
      kept.append(request)
  round_.decode = tuple(r.request_id for r in kept)
  round_.preempt = tuple(preempted)
  if preempted:
    round_.closed = True


def resume_parked(round_: Round) -> None:
  """Starts the compute of the parked batch, which was given its tokens when it was formed."""
  parked = round_.view.parked
  if parked is None:
    return
  round_.resume = parked.request_ids
  round_.tokens_left -= parked.compute_tokens
  round_.requests_left -= len(parked.request_ids)


def continue_prefills(round_: Round, load_or_compute: LoadOrCompute) -> None:
  """Gives prompts that are being computed their next chunks."""
  preempted = set(round_.preempt)
  for request in round_.view.running:
    if request.phase != "prefill" or request.request_id in preempted:
      continue
    candidate = Candidate(
      request.request_id,
      request.path,
      request.tail_tokens,
      -1,
      request.context_tokens,
    )
    offer = proceed(round_, candidate, load_or_compute)
    if offer is None:
      return
    round_.take(candidate, offer)


def keep_reserve(round_: Round) -> None:
  """Keeps room for the outputs of running requests before others are admitted."""
  round_.pages_left -= reserve_pages(round_)


def lengthen_decode(round_: Round) -> None:
  """Asks for several decode steps at once when nothing but decode can happen in them."""
  most = round_.view.budgets.decode_steps
  if most == 1 or not round_.decode or round_.entries or round_.resume or round_.preempt:
    return
  if round_.view.parked is not None or round_.park or round_.deferred or round_.held:
    return
  chosen = set(round_.decode)
  decoding = [r for r in round_.view.running if r.request_id in chosen]
  steps = min(most, min(r.output_tokens_left for r in decoding))
  page = round_.page_size
  free = round_.view.free_pages + round_.view.evictable_pages
  while steps > 1:
    pages = sum(-(-(r.context_tokens + steps) // page) - -(-r.context_tokens // page)
                for r in decoding)  # fmt: skip
    if pages <= free:
      round_.decode_steps = steps
      return
    steps //= 2
