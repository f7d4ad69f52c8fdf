"""How long one call of `schedule` takes: the part of `experiments.control_plane` for policies."""

import time
from collections.abc import Sequence

from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import policy_config, schedule
from strata_jax.scheduler.views import (
  Budgets,
  Producer,
  RequestView,
  RunningView,
  SchedulerView,
  Span,
  SpanState,
)

_SHARED = 24  # requests that share a document


def schedule_view(waiting: int, *, running: int = 32, version: int = 0) -> SchedulerView:
  """A view like those of long documents under load: `waiting` requests, page size 16.

  Each group of 24 shares a document of 16k tokens in three nodes: on the device, on host or being
  computed by a running request, in turn; then come a node of its own and a question.
  """
  requests = []
  for index in range(waiting):
    group = index // _SHARED
    state: SpanState = ("host", "device", "host", "in_flight")[group % 4]
    path = (
      Span(4 * group, 8192, "device" if state == "in_flight" else state),
      Span(4 * group + 1, 4096, state),
      Span(4 * group + 2, 4096, state),
      Span(1_000_000 + index, 64, "in_queue"),
    )
    requests.append(
      RequestView(
        request_id=10_000 + index,
        arrival_s=0.01 * index,
        path=path,
        tail_tokens=11,
        output_reserve_tokens=16,
      )
    )
  decoding = tuple(
    RunningView(
      request_id=index, phase="decode", arrival_s=0.0, context_tokens=16_000 + index,
      output_tokens_left=8, held_pages=4,
    )
    for index in range(running)
  )  # fmt: skip
  in_flight = {
    4 * group + node: Producer(0, 4096)
    for group in range(3, waiting // _SHARED + 1, 4)
    for node in (1, 2)
  }
  return SchedulerView(
    version=version,
    waiting=tuple(requests),
    running=decoding,
    in_flight=in_flight,
    free_pages=2_000,
    evictable_pages=40_000,
    capacity_pages=60_000,
    budgets=Budgets(page_size=16, step_tokens=8192, batch_requests=16, running_requests=128),
  )


def measure(
  sizes: Sequence[int] = (128, 4096), *, repeats: int = 400, config: SchedulerConfig | None = None
) -> dict[str, float]:
  """Wall times of `schedule`, in microseconds.

  Returns:
    `schedule_<size>_median_us` and `schedule_<size>_p99_us` for each number of waiting requests.
  """
  config = config or policy_config("strata")
  found: dict[str, float] = {}
  for size in sizes:
    count = max(20, repeats * 128 // size)
    views = [schedule_view(size, version=version) for version in range(4)]
    times = []
    for index in range(count + 4):
      view = views[index % 4]
      started_s = time.perf_counter()
      schedule(view, config)
      times.append(time.perf_counter() - started_s)
    ordered = sorted(times[4:])
    found[f"schedule_{size}_median_us"] = 1e6 * ordered[len(ordered) // 2]
    found[f"schedule_{size}_p99_us"] = (
      1e6 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    )
  return found
