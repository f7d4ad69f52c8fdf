"""Short ways to write views in tests."""

from typing import Any

from strata_jax.scheduler.views import (
  Budgets,
  RequestView,
  RunningView,
  SchedulerView,
  Span,
  StepPlan,
)

BUDGETS = Budgets(page_size=1, step_tokens=8192, batch_requests=16, running_requests=64)


def budgets(**changes: int) -> Budgets:
  values = {
    "page_size": 1, "step_tokens": 8192, "batch_requests": 16, "running_requests": 64,
  }  # fmt: skip
  return Budgets(**{**values, **changes})


def waits(request_id: int, *path: tuple, tail: int = 1, **more: Any) -> RequestView:
  """A waiting request; path elements are (node id, tokens, state[, locked])."""
  more.setdefault("output_reserve_tokens", 0)
  return RequestView(
    request_id=request_id,
    arrival_s=float(request_id),
    path=tuple(Span(*span) for span in path),
    tail_tokens=tail,
    **more,
  )


def decodes(request_id: int, context: int = 100, **more: Any) -> RunningView:
  more.setdefault("output_tokens_left", 8)
  return RunningView(
    request_id=request_id, phase="decode", arrival_s=0.0, context_tokens=context, **more
  )


def prefills(
  request_id: int, context: int, *path: tuple, tail: int = 1, **more: Any
) -> RunningView:
  spans = tuple(Span(*span) for span in path)
  return RunningView(
    request_id=request_id,
    phase="prefill",
    arrival_s=0.0,
    context_tokens=context,
    remaining_prefill_tokens=sum(span.tokens for span in spans) + tail,
    path=spans,
    tail_tokens=tail,
    **more,
  )


def view(*waiting: RequestView, **more: Any) -> SchedulerView:
  more.setdefault("version", 1)
  more.setdefault("budgets", BUDGETS)
  more.setdefault("free_pages", 1_000_000)
  more.setdefault("capacity_pages", 1_000_000)
  return SchedulerView(waiting=waiting, **more)


def admitted(plan: StepPlan) -> list[int]:
  return [entry.request_id for entry in plan.prefill]


def deferred(plan: StepPlan) -> list[int]:
  return [request_id for request_id, _, _ in plan.deferred]
