"""Views with names whose plans are kept in `golden/`, one record a case.

`python -m tests.scheduler.golden_cases` writes them anew after a change that is meant.
"""

import math
import pathlib

from strata_jax.recording import Recorder
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import schedule
from strata_jax.scheduler.views import (
  Costs,
  ParkedView,
  PrefetchView,
  Producer,
  RunningView,
  SchedulerView,
)
from tests.scheduler.build import budgets, decodes, prefills, view, waits

FOLDER = pathlib.Path(__file__).parent / "golden"
STRATA = SchedulerConfig()

Case = tuple[SchedulerConfig, tuple[SchedulerView, ...]]


def _worked_example() -> Case:
  """A loads 65,536 for 128, B the same elsewhere, C computes 1,024: A + C make 56.9."""
  requests = (
    waits(0, (1, 65_536, "host"), tail=128),
    waits(1, (2, 65_536, "host"), tail=128),
    waits(2, (3, 1_000, "in_queue"), tail=24),
  )
  return STRATA, (view(*requests, budgets=budgets(batch_requests=2)),)


def _two_cold_twins() -> Case:
  return STRATA, (view(*(waits(i, (1, 4_999, "in_queue")) for i in range(2))),)


def _small_shared_run() -> Case:
  """A run of at most 100 tokens defers nobody."""
  twins = (waits(i, (1, 100, "in_queue"), (2 + i, 4_000, "in_queue")) for i in range(2))
  return STRATA, (view(*twins),)


def _groups() -> Case:
  """22 groups of 10 prompts with a shared beginning of 400 tokens."""
  requests = (
    waits(10 * group + i, (group, 400, "in_queue"), (1_000 + 10 * group + i, 50, "in_queue"))
    for group in range(22)
    for i in range(10)
  )
  roomy = budgets(step_tokens=1 << 20, batch_requests=256, running_requests=256)
  return STRATA, (view(*requests, budgets=roomy),)


def _twin_of_the_running_batch() -> Case:
  running = prefills(0, 2_048, (1, 2_952, "in_flight"))
  twin = waits(1, (9, 2_048, "device"), (1, 2_952, "in_flight"))
  return STRATA, (view(twin, running=(running,), in_flight={1: Producer(0, 2_952)}),)


def _three_share_a_host_prefix() -> Case:
  """Loaded once, counted once: there is exactly room for the prefix and three tails."""
  requests = (waits(i, (1, 8_000, "host"), tail=100) for i in range(3))
  return STRATA, (view(*requests, free_pages=8_300),)


def _device_host_missing() -> Case:
  """One prompt of all three: device pages are pinned, host is loaded, the rest computed."""
  path = ((1, 1_024, "device"), (2, 2_048, "host"), (3, 512, "in_queue"))
  small = budgets(page_size=16)
  return STRATA, (
    view(waits(0, *path, tail=5), budgets=small, free_pages=161, evictable_pages=64),
    view(waits(0, *path, tail=5), budgets=small, free_pages=160, evictable_pages=64),
  )


def _long_prompt_in_chunks() -> Case:
  """Request 0 computes 100k tokens, 1 shares its first 60k: it runs once these are there."""

  def at(done: int) -> SchedulerView:
    shared_left, own = 60_000 - done, 40_000 - max(0, done - 60_000)
    shared = ((1, done, "device", True),) if shared_left else ((1, 60_000, "device", True),)
    pending = ((2, shared_left, "in_flight"),) if shared_left > 0 else ()
    running = prefills(0, done, *pending, (3, own, "in_flight"))
    in_flight = {3: Producer(0, shared_left + own)}
    if shared_left > 0:
      in_flight[2] = Producer(0, shared_left)
    return view(
      waits(
        1, *(shared if done else ()), *pending, (4, 500, "in_queue"), front=done > 0, after=(2,)
      ),
      running=(running,),
      in_flight=in_flight,
      budgets=budgets(step_tokens=12_000),
    )

  return STRATA, tuple(at(done) for done in (0, 12_000, 48_000, 60_000))


def _producer_aborts() -> Case:
  """Its finished chunk stays, its transient nodes are gone: the deferred one computes the rest."""
  waiting = waits(
    1, (1, 2_048, "device"), (2, 2_952, "in_queue"), deferrals=1, front=True, after=(2,)
  )
  return STRATA, (view(waiting, free_pages=5_000, evictable_pages=2_048),)


def _chunks_consult_the_cache() -> Case:
  """A prompt under way finds host and device spans before what it would compute next."""
  running = prefills(
    0, 4_096, (5, 1_024, "device", True), (6, 2_048, "host"), (7, 900, "in_flight")
  )
  return STRATA, (view(running=(running,), in_flight={7: Producer(0, 3_972)}),)


def _small_behind_big() -> Case:
  """[needs 1,000, needs 10, needs 10] with 50 free; then the first is urgent."""
  requests = tuple(waits(i, tail=tail) for i, tail in enumerate((1_000, 10, 10)))
  urgent = waits(0, tail=1_000, bypasses=8)
  return STRATA, (
    view(*requests, free_pages=50),
    view(urgent, *requests[1:], free_pages=50, version=2),
  )


def _parked_batch() -> Case:
  """A loading-bound batch is parked beside decodes, stays, and resumes when the load is short."""
  heavy = waits(0, (1, 65_536, "host"), tail=128)

  def later(left: int) -> SchedulerView:
    parked = RunningView(
      request_id=0, phase="parked", arrival_s=0.0, context_tokens=65_536,
      remaining_prefill_tokens=128,
    )  # fmt: skip
    return view(
      waits(2, tail=64),
      running=(decodes(9), parked),
      parked=ParkedView((0,), left, 128),
      loading={1: left},
    )

  return STRATA, (view(heavy, running=(decodes(9),)), later(30_000), later(12_000), later(0))


def _bundle() -> Case:
  """1 shares what the head loads and joins it, before 2 that arrived earlier."""
  requests = (
    waits(0, (1, 20_000, "host"), tail=200),
    waits(1, (2, 30_000, "host"), tail=10),
    waits(2, (1, 20_000, "host"), (3, 80, "host"), tail=50),
    waits(3, (1, 20_000, "host"), (4, 101, "host"), tail=1),
  )
  return STRATA, (view(*requests, budgets=budgets(batch_requests=3)),)


def _preemption() -> Case:
  """Three decodes need a page, one is free: the youngest goes back."""
  running = tuple(decodes(i, context=64, next_pages=1, held_pages=4) for i in range(3))
  return STRATA, (view(waits(7, tail=4), running=running, free_pages=1),)


def _prefetch_timeout() -> Case:
  config = SchedulerConfig(prefetch="timeout")
  late = waits(0, (1, 512, "host"), (2, 512, "storage"), prefetch=PrefetchView(512, 1_024, 3.0))
  return config, (view(late, now_s=1.0), view(late, now_s=3.0))


def _split() -> Case:
  """Half of a host hit is loaded while the other half is computed: both take as long."""
  config = SchedulerConfig(load_or_compute="split", bubble_filling=False)
  costs = Costs(load_s_per_token=1e-3, compute_s_per_token=1e-3)
  path = (1, 4_096, "host")
  return config, (
    view(waits(0, path, tail=16), costs=costs, budgets=budgets(page_size=16)),
    view(waits(0, path, tail=16), costs=Costs(load_s_per_token=1e-6, compute_s_per_token=1e-3)),
  )


def _published_limits() -> Case:
  """Without limits an often postponed request stays postponed; with them it is taken."""
  config = SchedulerConfig(
    max_deferrals=math.inf, max_postponements=math.inf, max_bypasses=math.inf
  )
  requests = (
    waits(0, (1, 65_536, "host"), tail=8, postponements=30),
    waits(1, tail=300, front=True),
    waits(2, tail=300),
  )
  return config, (view(*requests, budgets=budgets(batch_requests=2)),)


CASES = {
  "worked_example": _worked_example,
  "two_cold_twins": _two_cold_twins,
  "small_shared_run": _small_shared_run,
  "groups": _groups,
  "twin_of_the_running_batch": _twin_of_the_running_batch,
  "three_share_a_host_prefix": _three_share_a_host_prefix,
  "device_host_missing": _device_host_missing,
  "long_prompt_in_chunks": _long_prompt_in_chunks,
  "producer_aborts": _producer_aborts,
  "chunks_consult_the_cache": _chunks_consult_the_cache,
  "small_behind_big": _small_behind_big,
  "parked_batch": _parked_batch,
  "bundle": _bundle,
  "preemption": _preemption,
  "prefetch_timeout": _prefetch_timeout,
  "split": _split,
  "published_limits": _published_limits,
}


def write() -> None:
  """Writes all cases."""
  for name, case in CASES.items():
    config, views = case()
    with Recorder(FOLDER / f"{name}.jsonl", policy="", config=config) as recorder:
      for one in views:
        recorder(one, schedule(one, config))


if __name__ == "__main__":
  write()
