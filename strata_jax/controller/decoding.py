"""Gives decoding requests the pages of their next steps. Runs for every token: kept short."""

from collections.abc import Mapping

from strata_jax.controller.request_state import RequestState
from strata_jax.controller.tiers import CacheTiers
from strata_jax.executors.protocol import DecodeWork
from strata_jax.scheduler.views import StepPlan


def decode_works(
  tiers: CacheTiers, running: Mapping[int, RequestState], plan: StepPlan, stale: list[int]
) -> list[DecodeWork]:
  """The decodes of a plan, with pages for all its steps; who gets none is added to `stale`.

  Page tables are views of the requests' own: they do not change before the step is done.
  """
  steps, page_size = plan.decode_steps, tiers.page_size
  chosen: list[RequestState] = []
  growing: list[tuple[RequestState, int]] = []  # with how many pages it needs
  wanted = 0
  for request_id in plan.decode:
    state = running.get(request_id)
    if state is None or state.phase != "decode" or state.over:
      stale.append(request_id)
      continue
    missing = state.context_tokens + steps - state.page_count * page_size
    if missing > 0:
      pages = (missing + page_size - 1) // page_size
      if not tiers.fits(wanted + pages):
        stale.append(request_id)
        continue
      wanted += pages
      growing.append((state, pages))
    chosen.append(state)
  if growing:
    slots = tiers.allocate(wanted)
    taken = 0
    for state, pages in growing:
      state.add_own(slots[taken : taken + pages])
      taken += pages
  works: list[DecodeWork] = []
  for state in chosen:
    state.in_step = True
    position = state.context_tokens
    works.append(
      DecodeWork(
        request_id=state.request_id,
        token_id=state.last_token,
        position=position,
        page_table=state.pages[: (position + steps + page_size - 1) // page_size],
      )
    )
  return works
