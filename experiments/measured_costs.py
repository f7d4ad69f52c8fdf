"""Times what a policy may weigh, before a run and on its machine: compute, loads, storage reads.

Everything goes through the executor, as in serving, on pools that hold nothing yet; each time is
the median of a few. Loads come with a short prefill that waits for them, as those of a request do:
what a back end moves for it, and who launches beside its copies, is in their time. With a store
some pages are written, read and deleted again: its reads are timed with the page cache warm, like
those of pages that a run wrote itself.
"""

import secrets
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from experiments import flags, run_folder, serve_setup
from strata_jax import page_keys
from strata_jax.executors.jax_executor import JaxExecutor
from strata_jax.executors.protocol import (
  DecodeWork,
  Event,
  Executor,
  LoadDone,
  LoadWork,
  LookUpWork,
  PrefetchDone,
  PrefetchWork,
  PrefillWork,
  SamplingParams,
  SpillDone,
  SpillWork,
  StepDone,
  StepWork,
)
from strata_jax.scheduler.policies import POLICIES
from strata_jax.scheduler.views import Costs
from strata_jax.tiers import page_store

_REPEATS = 5
_REQUEST_ID = -1
_NO_SLOTS = np.zeros(0, np.int32)


def of_run(
  args: flags.Args,
  setup: serve_setup.Setup,
  executor: JaxExecutor,
  store: page_store.PageStore | None,
) -> Costs:
  """What the policy of a run is shown, as --costs says; the executor is compiled."""
  chooses = setup.scheduler.load_or_compute in ("cheaper", "split")
  weighs = chooses or setup.scheduler.prefetch == "cost" or setup.policy_name not in POLICIES
  if args.costs == "unknown" or (args.costs == "auto" and not weighs):
    return Costs()
  buckets, page_size = executor.buckets, setup.cache.page_size
  costs = measure(
    executor,
    page_size=page_size,
    device_pages=setup.cache.device_pages,
    host_pages=setup.cache.host_pages,
    chunk_tokens=buckets.chunk_tokens[-1],
    context_tokens=buckets.table_pages * page_size,
    read_tokens=setup.storage.config.read_tokens if setup.storage else page_size,
    store=store,
  )
  parts = ("computed", costs.compute_s_per_token), ("loaded", costs.load_s_per_token)
  parts += (("from storage", costs.prefetch_s_per_token),)
  run_folder.say("us a token: " + ", ".join(f"{what} {s * 1e6:.1f}" for what, s in parts))
  return costs


def measure(
  executor: Executor,
  *,
  page_size: int,
  device_pages: int,
  host_pages: int,
  chunk_tokens: int,
  context_tokens: int,
  read_tokens: int,
  store: page_store.PageStore | None = None,
) -> Costs:
  """Times an idle executor whose pools hold nothing that is needed; it overwrites pages of both.

  Args:
    executor: compiled.
    page_size: tokens of a page.
    device_pages: of the device pool.
    host_pages: of the host pool; 0: no loads and no storage.
    chunk_tokens: tokens of the prefill that is timed, at most.
    context_tokens: of the longest context that the executor takes.
    read_tokens: tokens of one read of the store.
    store: of the executor, for taking the pages out again; none: there is no storage.

  Returns:
    Seconds a token. 0, unknown, where there is no tier, or where the store takes no pages.
  """
  timing = _Timing(executor, page_size)
  room = min(device_pages * page_size, context_tokens)
  executor.register(_REQUEST_ID, SamplingParams(), np.zeros(4 * _REPEATS, np.int32))
  pages = min((room - 1) // page_size, host_pages)  # and one behind them, to compute
  try:
    costs = timing.compute(min(chunk_tokens, room), room)
    if pages:
      costs |= timing.loads(pages)
  finally:
    executor.release(_REQUEST_ID)
  if store is not None and host_pages:
    costs |= timing.reads(min(_pages(read_tokens, page_size), host_pages), store)
  return Costs(**costs)


def _pages(tokens: int, page_size: int) -> int:
  return max(1, tokens // page_size)


class _Timing:
  """Carries work out, one piece at a time."""

  def __init__(self, executor: Executor, page_size: int) -> None:
    self._executor = executor
    self._page_size = page_size
    self._ids = 0
    self._events: list[Event] = []  # seen, not asked for yet

  def compute(self, chunk: int, room: int) -> dict[str, float]:
    """A chunk without and with a context before it, and a decode step, in `room` tokens."""
    page = self._page_size
    table = np.arange(-(-room // page), dtype=np.int32)
    token_ids = np.zeros(chunk, np.int32)

    def prefill_s(start: int) -> float:
      work = PrefillWork(
        request_id=_REQUEST_ID, token_ids=token_ids, start=start,
        page_table=table[: -(-(start + chunk) // page)], samples=False,
      )  # fmt: skip
      done = self._step(prefills=(work,))
      return done.prefill_end_s - done.started_s

    def decode_s() -> float:
      done = self._step(decodes=(DecodeWork(_REQUEST_ID, 0, 0, table[:1]),))
      return done.at_s - done.started_s

    # Seconds of a chunk: tokens * (a + b * mean context).
    begin = (room - chunk) // page * page
    first_s = _median(lambda: prefill_s(0))
    slope = 0.0
    if begin:
      slope = max(0.0, (_median(lambda: prefill_s(begin)) - first_s) / (chunk * begin))
    return {
      "compute_s_per_token": max(first_s / chunk - slope * chunk / 2, 0.0),
      "compute_s_per_token_context": slope,
      "decode_step_s": _median(decode_s),
    }

  def loads(self, pages: int) -> dict[str, float]:
    """Loads of `pages` and of a quarter: back ends may move long lists in calls of equal size.

    The position behind them is computed, which needs a page more.
    """
    page = self._page_size

    def load_s(count: int) -> float:
      slots = np.arange(count + 1, dtype=np.int32)
      load = LoadWork(
        transfer_id=self._next_id(), request_id=_REQUEST_ID, node_ids=(), host_slots=slots[:-1],
        device_slots=slots[:-1], tokens=count * page,
      )  # fmt: skip
      behind = PrefillWork(
        request_id=_REQUEST_ID, token_ids=np.zeros(1, np.int32), start=count * page,
        page_table=slots, samples=False, waits_for=(load.transfer_id,),
      )  # fmt: skip
      began_s = self._executor.now_s()
      work = StepWork(step_id=self._next_id(), loads=(load,), prefills=(behind,))
      self._executor.launch(work)
      loaded = self._until(LoadDone)
      self._until(StepDone)
      return loaded.at_s - began_s

    some = -(-pages // 4)
    some_s, all_s = _median(lambda: load_s(some)), _median(lambda: load_s(pages))
    page_s = (all_s - some_s) / (pages - some) if pages > some else 0.0
    if page_s <= 0.0:  # too short to tell the latency from the rest
      return {"load_s_per_token": all_s / (pages * self._page_size)}
    return {
      "load_s_per_token": page_s / self._page_size,
      "load_latency_s": max(0.0, some_s - some * page_s),
    }

  def reads(self, pages: int, store: page_store.PageStore) -> dict[str, float]:
    """A read of pages that no prompt has."""
    slots = np.arange(pages, dtype=np.int32)
    parent_key = secrets.token_bytes(page_keys.KEY_BYTES)
    token_ids = np.zeros(pages * self._page_size, np.int32)
    look_up = LookUpWork(
      work_id=self._next_id(), request_id=_REQUEST_ID, parent_key=parent_key,
      token_ids=token_ids, skip_pages=0,
    )  # fmt: skip
    self._executor.launch_storage(
      SpillWork(
        work_id=self._next_id(), parent_key=parent_key, token_ids=token_ids, skip_pages=0,
        host_slots=slots,
      )
    )  # fmt: skip
    self._executor.flush_storage()
    if not self._until(SpillDone).ok:
      return {}

    def read_s() -> float | None:
      began_s = self._executor.now_s()
      self._executor.launch_storage(
        PrefetchWork(work_id=self._next_id(), look_up=look_up, first_page=0, host_slots=slots)
      )
      done = self._until(PrefetchDone)
      return done.at_s - began_s if done.pages == pages else None

    times = [read_s() for _ in range(_REPEATS)]
    store.delete(page_keys.page_keys(parent_key, token_ids, self._page_size))
    whole = [seconds for seconds in times if seconds is not None]
    return {"prefetch_s_per_token": statistics.median(whole) / token_ids.size} if whole else {}

  def _step(
    self, prefills: tuple[PrefillWork, ...] = (), decodes: tuple[DecodeWork, ...] = ()
  ) -> StepDone:
    self._executor.launch(StepWork(step_id=self._next_id(), prefills=prefills, decodes=decodes))
    return self._until(StepDone)

  def _until[E: Event](self, kind: type[E]) -> E:
    """Waits for the one event of a kind; events of other kinds are left for later calls."""
    while True:
      for event in self._events:
        if isinstance(event, kind):
          self._events.remove(event)
          return event
      self._events += self._executor.wait(None)

  def _next_id(self) -> int:
    self._ids -= 1  # below those of a run
    return self._ids


def _median(seconds: Callable[[], float]) -> float:
  """Of a few calls after one that does not count."""
  seconds()
  times: Sequence[float] = [seconds() for _ in range(_REPEATS)]
  return statistics.median(times)
