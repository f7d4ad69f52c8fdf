"""CacheController: the one owner of what page of which tier holds what.

Turns plans into work and completions into tree states. No clock: times are handed in and only
passed on. Deterministic: the same calls give the same slots. The parts are in
`strata_jax/controller/`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from strata_jax import validation
from strata_jax.config import CacheConfig, ServingConfig, StorageConfig
from strata_jax.controller import admission, leaving, view_builder
from strata_jax.controller.checks import check_controller
from strata_jax.controller.decoding import decode_works
from strata_jax.controller.publishing import give_up_duplicates, publish
from strata_jax.controller.request_state import RequestState, output_limit
from strata_jax.controller.results import Admission, Applied, BackupProgress, ControllerStats
from strata_jax.controller.tiers import CacheTiers
from strata_jax.controller.waiting_line import WaitingLine
from strata_jax.executors.protocol import (
  BackupDone,
  DecodeWork,
  Event,
  LoadDone,
  LoadWork,
  PrefillWork,
  StepDone,
  StepWork,
  StorageWork,
)
from strata_jax.radix_tree import DEVICE, HOST, HiRadixTree
from strata_jax.scheduler.views import (
  Budgets,
  Costs,
  Prefill,
  Refused,
  SchedulerView,
  StepPlan,
)
from strata_jax.storage_tier import StorageTier
from strata_jax.workloads.request import Request

__all__ = ["Admission", "Applied", "CacheController", "ControllerStats"]

Outputs = tuple[tuple[int, tuple[int, ...]], ...]  # (request id, its new tokens)

_UNKNOWN = -1  # stands for a token that a step under way will give


class CacheController:
  """Metadata of the device and host tiers, and of every request in the system.

  Args:
    cache: the tiers and how pages move down.
    serving: budgets of a step and of the running set, shown to the scheduler.
    fingerprint: names model and layout in the page keys of lower tiers.
    context_tokens: longest prompt with its output; None: only the device pool limits it.
    costs: shown to the scheduler.
    storage: the tier below the host; None: there is none.

  Raises:
    ValueError: steps too short for a page.
  """

  def __init__(
    self,
    cache: CacheConfig,
    serving: ServingConfig,
    *,
    fingerprint: str = "",
    context_tokens: int | None = None,
    costs: Costs = Costs(),
    storage: StorageConfig | None = None,
  ) -> None:
    if serving.step_tokens < cache.page_size:  # chunks are whole pages: no prompt would go on
      expected = f"at least a page of {cache.page_size} tokens"
      validation.fail(serving, "step_tokens", expected, serving.step_tokens)
    self.cache = cache
    self.serving = serving
    self.costs = costs
    self.context_tokens = context_tokens
    self.stats = ControllerStats()
    self.tiers = CacheTiers(cache, fingerprint, self.stats)
    self.storage: StorageTier | None = None
    if storage is not None and cache.enabled and cache.host_pages:
      self.storage = StorageTier(storage, self.tiers)
    self._budgets = Budgets(
      page_size=cache.page_size,
      step_tokens=serving.step_tokens,
      batch_requests=serving.batch_requests,
      running_requests=serving.running_requests,
      decode_steps=serving.decode_steps,
    )
    self._states: dict[int, RequestState] = {}
    self._waiting = WaitingLine(self.tiers, self.storage)
    self._running: dict[int, RequestState] = {}  # in admission order
    self._sequence = 0
    self._version = 0
    self._next_step = 0
    self._step: StepWork | None = None  # the computing step under way
    # Who gets a token of it and where in its tokens, once all the rest has been taken in.
    self._foreseen: list[tuple[RequestState, int]] | None = None

  @property
  def tree(self) -> HiRadixTree:
    return self.tiers.tree

  # -- requests come ------------------------------------------------------------------------------

  def add(self, request: Request, now_s: float) -> str | None:
    """Takes a request in. None: it waits; text: why it can never run (nothing changed).

    Raises ValueError for an id that is in the system already.
    """
    if request.request_id in self._states:
      raise ValueError(f"expected a new request id, got {request.request_id}, which is under way")
    prompt, outputs = len(request.prompt_ids), output_limit(request)
    if not prompt:
      return "empty prompt"
    if self.context_tokens is not None and prompt + outputs > self.context_tokens:
      return (
        f"prompt of {prompt} and output of {outputs} tokens exceed "
        f"the context of {self.context_tokens} tokens"
      )
    pages = -(-(prompt + max(outputs - 1, 0)) // self.cache.page_size)  # the last has no KV
    if pages > self.cache.device_pages:
      return (
        f"prompt of {prompt} and output of {outputs} tokens need {pages} pages, "
        f"the device pool has {self.cache.device_pages}"
      )
    arrival_s = now_s if request.arrival_s is None else request.arrival_s
    root = self.tree.root(request.salt, request.adapter) if self.cache.enabled else None
    state = RequestState(request, self._sequence, arrival_s, root)
    self._sequence += 1
    self._states[request.request_id] = state
    self._waiting.add(state, now_s)
    return None

  # -- plans --------------------------------------------------------------------------------------

  def view(self, now_s: float) -> SchedulerView:
    """The frozen state a plan is made from. Publishes decoded pages; chunked prompts catch up."""
    tiers, running = self.tiers, self._running.values()
    admission.catch_up(tiers, running)
    page_size = self.cache.page_size
    for state in running:
      if (
        state.phase == "decode"
        and state.leaf is not None
        and state.context_tokens - state.leaf.end >= page_size
        and not state.in_step
      ):
        publish(tiers, state, self._whole_pages(state.context_tokens))
    if tiers.device.free_pages + tiers.tree.pages[DEVICE].evictable < len(self._running):
      for state in running:
        give_up_duplicates(tiers, state)
    self._version += 1
    prefilling = [state for state in running if state.phase != "decode"]
    return SchedulerView(
      version=self._version,
      waiting=self._waiting.views(),
      running=tuple([view_builder.running_view(s, tiers) for s in running]),
      parked=view_builder.parked_view(prefilling, tiers),
      in_flight=view_builder.in_flight_view(prefilling),
      loading=view_builder.loading_view(tiers),
      free_pages=tiers.device.free_pages,
      evictable_pages=tiers.tree.pages[DEVICE].evictable,
      capacity_pages=self.cache.device_pages,
      budgets=self._budgets,
      costs=self.costs,
      now_s=now_s,
    )

  def apply(self, plan: StepPlan, now_s: float) -> Applied:
    """Carries a plan out in the metadata and returns the work to launch.

    Entries that no longer fit what is held are dropped whole and named in `stale`.

    Raises:
      ValueError: a plan for the latest view that no state of the cache could make right.
      RuntimeError: a computing step is under way.
    """
    if self._step is not None:
      raise RuntimeError(f"step {self._step.step_id} is under way: no plan until its StepDone")
    self._check_plan(plan)
    stale: list[int] = []
    refused = tuple(refusal for refusal in plan.refused if self._refuse(refusal, stale))
    preempted = tuple(i for i in plan.preempt if self._preempt(i, stale, now_s))
    will_load: set = set()
    pinned = [p for entry in plan.prefill if (p := self._pin(entry, will_load, stale))]
    decodes = decode_works(self.tiers, self._running, plan, stale)
    admitted, loads, parked_loads, prefills = self._prefill(plan, pinned, stale)
    resumed: list[int] = []
    for request_id in plan.resume:
      state = self._running.get(request_id)
      if state is None or state.phase != "parked":
        stale.append(request_id)
        continue
      state.phase = "prefill"
      resumed.append(request_id)
      prefills.append(admission.prefill_work(self.tiers, state))
    self._waiting.note(plan)
    self.stats.stale_entries += len(stale)
    return Applied(
      work=self._work(loads, parked_loads, prefills, decodes, plan.decode_steps),
      admitted=tuple(admitted),
      refused=refused,
      preempted=preempted,
      stale=tuple(stale),
      resumed=tuple(resumed),
    )

  def flush(self, now_s: float) -> StepWork | None:
    """Backups that wait for a step to ride in, as work of their own."""
    return self._work([], [], [], [], 1)

  def storage_work(self, now_s: float) -> tuple[StorageWork, ...]:
    """Reads and writes of the storage tier to start now, whatever else is under way."""
    return () if self.storage is None else self.storage.work(now_s)

  def backup_progress(self, tokens: Any, *, salt: str = "", adapter: str = "") -> BackupProgress:
    """How far the backup of a prompt's cached prefix got, in tokens."""
    match = self.tree.match(tokens, salt=salt, adapter=adapter)
    counts = {"": 0, "in_host": 0, "handed_over": 0, "durable": 0}
    for node in match.nodes:
      part = min(node.end, match.tokens) - node.start
      progress = "in_host" if node.ready(HOST) else ""
      if self.storage is not None:
        progress = self.storage.progress(node)
      counts[progress] += part if progress or node.ready(DEVICE) else 0
    return BackupProgress(*counts.values())

  # -- completions --------------------------------------------------------------------------------

  def foresee(self) -> tuple[int, ...] | None:
    """Takes in what is known of the step under way before it is done: all but its tokens.

    From then on views show what will be once it is done. `complete` brings the tokens, and until
    then `apply` refuses plans. Several decode steps cannot be foreseen: pages would be published
    whose tokens nobody knows.

    Returns:
      The requests that will get one token each; None where nothing can be foreseen.
    """
    step = self._step
    if step is None or self._foreseen is not None or (step.decodes and step.decode_steps > 1):
      return None
    ids = [prefill.request_id for prefill in step.prefills if prefill.samples]
    ids += [decode.request_id for decode in step.decodes]
    outputs = self._take_in(step, dict.fromkeys(ids, (_UNKNOWN,)))
    states = [self._states[request_id] for request_id, _ in outputs]
    self._foreseen = [(state, state.length - 1) for state in states]
    return tuple([state.request_id for state in states])

  def complete(self, event: Event, now_s: float) -> Outputs:
    """Takes an executor's event in; returns (request id, new tokens) of a finished step.

    Raises ValueError for a transfer or step that is not under way.
    """
    if isinstance(event, LoadDone):
      self.tiers.load_done(event)
    elif isinstance(event, BackupDone):
      self.tiers.backup_done(event)
    elif isinstance(event, StepDone):
      return self._step_done(event)
    else:
      if self.storage is None:
        raise ValueError(f"expected no event of a storage tier, got {event}")
      self.storage.complete(event, now_s)
    return ()

  def finish(self, request_id: int, now_s: float, *, output_tokens: int | None = None) -> None:
    """The request is over; its whole pages stay, of its output at most `output_tokens`.

    (Outputs of earlier steps are in the tree already and stay.) Raises ValueError unless it runs.
    """
    state = self._running.get(request_id)
    if state is None:
      raise ValueError(f"expected the id of a running request, got {request_id}")
    keep = state.length
    if output_tokens is not None:
      keep = min(keep, len(state.request.prompt_ids) + output_tokens)
    self.stats.finished += 1
    self._leave(state, keep)

  def abort(self, request_id: int, now_s: float) -> None:
    """Takes a request out, in any phase; unknown ids (already over) are ignored.

    What it computed stays in the cache. While its step is under way it keeps its pages.
    """
    state = self._states.get(request_id)
    if state is None or state.over:
      return
    self.stats.aborted += 1
    if state.phase == "waiting":
      self._drop_waiting(state)
    else:
      self._leave(state, state.length)

  def reset(self) -> None:
    """Empties every tier. Raises RuntimeError, changing nothing, while anything is in use."""
    if self._states or self.tiers.transfers or self._step is not None:
      raise RuntimeError(
        f"expected nothing in use, got {len(self._states)} requests and "
        f"{len(self.tiers.transfers)} transfers"
      )
    if self.storage is not None:
      self.storage.clear()
    self.tiers.clear()

  def check(self) -> None:
    """Raises AssertionError when an invariant is broken. Looks at everything: for tests."""
    check_controller(self.tiers, self._states.values(), list(self._waiting), self._running.values())

  # -- inside: waiting ----------------------------------------------------------------------------

  def _drop_waiting(self, state: RequestState) -> None:
    self._waiting.drop(state)
    del self._states[state.request_id]

  def _refuse(self, refusal: Refused, stale: list[int]) -> bool:
    state = self._states.get(refusal.request_id)
    if state is None or state.phase != "waiting":
      stale.append(refusal.request_id)
      return False
    self.stats.refused += 1
    self._drop_waiting(state)
    return True

  # -- inside: running ----------------------------------------------------------------------------

  def _check_plan(self, plan: StepPlan) -> None:
    """Raises ValueError, before anything is changed, for what no state of the cache makes right."""
    if plan.version > self._version:
      raise ValueError(f"plan.version: expected at most {self._version}, got {plan.version}")
    named = [entry.request_id for entry in plan.prefill]
    for name, ids in (("prefill", named), ("decode", plan.decode), ("resume", plan.resume)):
      if len(set(ids)) < len(ids):
        raise ValueError(f"plan.{name}: expected each request once, got {list(ids)}")
    if plan.version < self._version:
      return  # made for what was: entries that do not fit any more are stale
    for entry in plan.prefill:
      state = self._states.get(entry.request_id)
      if state is not None and state.phase in ("waiting", "prefill"):
        wrong = admission.malformed(state, entry, self.cache.page_size)
        if wrong is not None:
          raise ValueError(f"plan for request {entry.request_id}: expected {wrong}")

  def _pin(self, entry: Prefill, will_load: set, stale: list[int]) -> admission.Pinned | None:
    state = self._states.get(entry.request_id)
    if state is None or state.over or state.phase not in ("waiting", "prefill"):
      stale.append(entry.request_id)
      return None
    wrong = admission.malformed(state, entry, self.cache.page_size)
    pinned = None if wrong else admission.pin(self.tiers, state, entry, will_load)
    if pinned is None:
      stale.append(entry.request_id)
    return pinned

  def _prefill(
    self, plan: StepPlan, entries: Sequence[admission.Pinned], stale: list[int]
  ) -> tuple[list[Admission], list[LoadWork], list[int], list[PrefillWork]]:
    """Admits and continues: (admissions, loads, ids of parked loads, chunks to compute)."""
    admitted: list[Admission] = []
    loads: list[LoadWork] = []
    parked_loads: list[int] = []
    prefills: list[PrefillWork] = []
    for pinned in entries:
      state = pinned.state
      if state.phase == "waiting":
        outcome = admission.admit(self.tiers, pinned)
      else:
        outcome = admission.proceed(self.tiers, pinned)
      pinned.release(self.tiers)
      if outcome is None:
        stale.append(state.request_id)
        continue
      admitted_now, load = outcome
      if load is not None:
        loads.append(load)
      if admitted_now is not None:
        admitted.append(admitted_now)
        self._waiting.remove(state)
        self._running[state.request_id] = state
        state.admitted_before = True
      state.chunk_start, state.chunk_end = pinned.start, pinned.end
      if state.request_id in plan.park:
        state.phase = "parked"
        if load is not None:
          parked_loads.append(load.transfer_id)
      else:
        state.phase = "prefill"
        prefills.append(admission.prefill_work(self.tiers, state))
    return admitted, loads, parked_loads, prefills

  def _work(
    self,
    loads: list[LoadWork],
    parked_loads: list[int],
    prefills: list[PrefillWork],
    decodes: list[DecodeWork],
    decode_steps: int,
  ) -> StepWork | None:
    backups = self.tiers.start_backups()
    if not (loads or backups or prefills or decodes):
      return None
    work = StepWork(
      step_id=self._next_step,
      loads=tuple(loads),
      backups=backups,
      prefills=tuple(prefills),
      decodes=tuple(decodes),
      decode_steps=decode_steps,
      parked_loads=tuple(parked_loads),
    )
    self._next_step += 1
    if work.computes:
      self._step = work
    return work

  def _step_done(self, event: StepDone) -> Outputs:
    step = self._step
    if step is None or step.step_id != event.step_id:
      raise ValueError(f"expected the step under way, got {event.step_id}")
    self._step = None
    foreseen, self._foreseen = self._foreseen, None
    return self._take_in(step, event.tokens) if foreseen is None else _fill_in(foreseen, event)

  def _take_in(self, step: StepWork, tokens: Mapping[int, tuple[int, ...]]) -> Outputs:
    """The step is done: its pages are published, its requests go on."""
    outputs: list[tuple[int, tuple[int, ...]]] = []
    for prefill in step.prefills:
      state = self._states[prefill.request_id]
      state.in_step = False
      state.context_tokens = state.chunk_end
      publish(self.tiers, state, self._whole_pages(state.chunk_end))
      if prefill.samples:
        state.phase = "decode"
        state.tip = state.leaf  # nothing of it is in flight any more
        self._append(state, tokens, outputs)
      if state.over:
        self._leave_now(state)
    states = self._states
    for decode in step.decodes:
      state = states[decode.request_id]
      state.in_step = False
      state.context_tokens += self._append(state, tokens, outputs)
      if state.over:
        self._leave_now(state)
    return tuple(outputs)

  def _append(
    self,
    state: RequestState,
    tokens: Mapping[int, tuple[int, ...]],
    outputs: list[tuple[int, tuple[int, ...]]],
  ) -> int:
    """Takes a request's sampled tokens in; returns how many."""
    new = tokens.get(state.request_id, ())
    if new:
      state.append(new)
    elif not state.over:
      raise ValueError(f"expected tokens of request {state.request_id} in its StepDone, got none")
    if not state.over:
      outputs.append((state.request_id, new))
    return len(new)

  def _preempt(self, request_id: int, stale: list[int], now_s: float) -> bool:
    state = self._running.get(request_id)
    if state is None or state.over:
      stale.append(request_id)
      return False
    self.stats.preempted += 1
    state.computed_tokens = max(state.computed_tokens, state.context_tokens)
    leaving.release(self.tiers, state, state.context_tokens)
    del self._running[request_id]
    state.prompt_tokens = state.length
    state.context_tokens = 0
    state.deferrals = state.postponements = state.bypasses = 0
    state.delayed_start = state.delayed_end = 0
    self._waiting.add(state, now_s)
    return True

  def _leave(self, state: RequestState, keep_tokens: int) -> None:
    """A running request is over: now, or when its step is done."""
    state.over = True
    state.keep_tokens = keep_tokens
    if not state.in_step:
      self._leave_now(state)

  def _leave_now(self, state: RequestState) -> None:
    leaving.release(self.tiers, state, state.keep_tokens)
    del self._running[state.request_id]
    del self._states[state.request_id]

  def _whole_pages(self, tokens: int) -> int:
    return tokens // self.cache.page_size * self.cache.page_size


def _fill_in(foreseen: Sequence[tuple[RequestState, int]], event: StepDone) -> Outputs:
  """Brings the tokens of a step that was foreseen; those of requests that left come too."""
  outputs: list[tuple[int, tuple[int, ...]]] = []
  for state, position in foreseen:
    tokens = event.tokens.get(state.request_id, ())
    if len(tokens) != 1:
      if state.over:
        continue
      raise ValueError(f"expected one token of request {state.request_id}, got {tokens}")
    state.tokens[position] = state.last_token = tokens[0]
    outputs.append((state.request_id, tokens))
  return tuple(outputs)
