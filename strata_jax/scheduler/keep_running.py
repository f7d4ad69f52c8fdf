"""What runs already goes on: decode steps, preemption when pages run out, the next chunks.

Running requests come first: decodes take their next pages, then the parked batch resumes, then
prompts continue in admission order, each consulting the cache for its next chunk.
"""

from collections.abc import Callable

from strata_jax.scheduler.admit import LoadOrCompute, proceed
from strata_jax.scheduler.fill_bubble import resumable
from strata_jax.scheduler.round import Candidate, Round, reserve_pages
from strata_jax.scheduler.views import Deferred, RunningView

Defer = Callable[[Round, Candidate], Deferred | None]


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
  """Starts the compute of parked requests, and opens what they leave of the window to others."""
  view, config = round_.view, round_.config
  if view.parked is None:
    return
  parked = [r for r in view.running if r.phase == "parked"]
  resumed = list(resumable(round_, parked))
  computes = view.parked.compute_tokens
  if len(resumed) < len(parked):
    kept: list[RunningView] = []
    tokens = 0
    for request in resumed:  # a chunk at most each; no more than fit into a step
      tokens += min(request.remaining_prefill_tokens, view.parked.compute_tokens)
      if kept and tokens > round_.tokens_left:
        break
      kept.append(request)
      computes = tokens
    resumed = kept
  if not resumed:
    computes = 0
  round_.resume = tuple(r.request_id for r in resumed)
  round_.tokens_left -= computes
  round_.requests_left -= len(resumed)
  if round_.parks and config.rolling_loads:
    round_.loads_wait = True
    if view.costs.load_s_per_token > 0:
      window_tokens = config.window_s / view.costs.load_s_per_token
      round_.window_tokens = window_tokens - view.parked.load_tokens_left
    round_.later_requests_left = view.budgets.batch_requests - (len(parked) - len(resumed))
    round_.later_tokens_left = view.budgets.step_tokens - (view.parked.compute_tokens - computes)


def continue_prefills(round_: Round, load_or_compute: LoadOrCompute, defer: Defer) -> None:
  """Gives prompts that are being computed their next chunks.

  Requests at the front whose delay hit is there now need not wait for the producer's whole prompt:
  up to half of the step's tokens are kept for them (`use_tokens_left` gives back what they leave).
  """
  preempted = set(round_.preempt)
  prompts = [r for r in round_.view.running if r.phase == "prefill"]
  if not prompts:
    return
  kept = _wanted_at_front(round_, defer)
  round_.tokens_left -= kept
  for request in prompts:
    if request.request_id in preempted:
      continue
    candidate = Candidate(
      request.request_id, request.path, request.tail_tokens, -1, request.context_tokens
    )
    offer = proceed(round_, candidate, load_or_compute)
    if offer is None:
      break
    round_.take(candidate, offer)
    round_.cut = candidate if offer.entry.compute_end < candidate.prompt_tokens else None
  round_.tokens_left += kept


def _wanted_at_front(round_: Round, defer: Defer) -> int:
  """Tokens to keep for released requests at the front: at most half of the step's."""
  half = max(0, round_.tokens_left) // 2
  half -= half % round_.page_size
  wanted = 0
  for index, request in enumerate(round_.view.waiting):
    if request.front:
      candidate = round_.candidate(index)
      if defer(round_, candidate) is None:
        wanted += candidate.prompt_tokens - candidate.hit_tokens
        if wanted >= half:
          return half
  return wanted


def use_tokens_left(round_: Round) -> None:
  """Lengthens the chunk that was cut by tokens that nobody took after all."""
  candidate = round_.cut
  if candidate is None or round_.tokens_left < round_.page_size:
    return
  for place, entry in enumerate(round_.entries):
    if entry.request_id == candidate.request_id:
      end = min(candidate.prompt_tokens, entry.compute_end + round_.tokens_left)
      if end < candidate.prompt_tokens:
        end -= end % round_.page_size
      round_.tokens_left -= end - entry.compute_end
      round_.compute_tokens += end - entry.compute_end
      round_.entries[place] = entry._replace(compute_end=end)


def keep_reserve(round_: Round) -> None:
  """Keeps room for the outputs of running requests before others are admitted."""
  round_.pages_left -= reserve_pages(round_)


def lengthen_decode(round_: Round) -> None:
  """Asks for several decode steps at once when nothing but decode can happen in them."""
  most = round_.view.budgets.decode_steps
  busy = round_.entries or round_.resume or round_.view.parked is not None
  if busy or round_.deferred or round_.held:
    return
  if most == 1 or not round_.decode or round_.preempt:
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
