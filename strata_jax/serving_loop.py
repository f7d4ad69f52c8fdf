"""The serving loop: arrivals and completions -> plan -> launch.

The loop decides how many requests are in flight and when an output ends. Pages belong to the
controller, decisions to the policy, time to the executor; the same loop drives a real and a
simulated one.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from strata_jax.cache_controller import Applied, CacheController
from strata_jax.clients import Clients
from strata_jax.config import ServingConfig
from strata_jax.executors.protocol import (
  Event,
  Executor,
  LoadDone,
  LookUpDone,
  PrefetchDone,
  PrefetchWork,
  SpillDone,
  SpillHanded,
  StepDone,
  StepWork,
)
from strata_jax.load_times import LoadTimes
from strata_jax.metrics import Outcome, RequestRecord, ServingResult, StepRow
from strata_jax.scheduler.policies import Policy
from strata_jax.scheduler.views import SchedulerView, StepPlan
from strata_jax.workloads.request import Request

Recorder = Callable[[SchedulerView, StepPlan], None]
Progress = Callable[[int, int], None]  # requests that are over, all requests

# Plans in a row that neither computed nor moved anything, before the loop says that nothing ever
# will: more than the rounds that waiting limits need to make a request urgent.
_IDLE_ROUNDS = 64


def serve(
  requests: Sequence[Request],
  *,
  controller: CacheController,
  policy: Policy,
  executor: Executor,
  serving: ServingConfig,
  recorder: Recorder | None = None,
  progress: Progress | None = None,
) -> ServingResult:
  """Serves requests until all are over and every transfer has finished.

  Args:
    requests: in the order of their arrival where times are equal. Requests without `arrival_s`
      stand in the client's queue from the start (closed loop).
    controller: nothing may be in use in it; what it has cached is used.
    policy: from a view to a plan, pure.
    executor: its clock is the run's clock.
    serving: the in-flight cap, a FIFO before the system, counts waiting and running requests.
    recorder: called with each view and the policy's plan.
    progress: called when a request is over.

  Returns:
    Records in the order of `requests`. An output ends before its stop token, after
    `max_new_tokens` (or the forced output); 0 of them means prefill only.

  Raises:
    ValueError: two requests with one id, a negative time, or one that follows a request that does
      not stand before it.
  """
  return _Run(requests, controller, policy, executor, serving, recorder, progress).run()


class _Live:
  """A request in the system."""

  __slots__ = ("computed_to", "dispatch_round", "limit", "record", "stop")

  def __init__(self, request: Request, record: RequestRecord, dispatch_round: int) -> None:
    forced = request.forced_output_ids
    self.record = record
    self.limit = request.max_new_tokens if forced is None else len(forced)
    self.stop = frozenset(request.stop_token_ids)
    self.dispatch_round = dispatch_round
    self.computed_to = 0  # tokens of its context that were computed or hit once


@dataclasses.dataclass(slots=True)
class _Under:
  """The computing step under way."""

  work: StepWork
  row: StepRow
  first_tokens: frozenset[int]  # requests whose last chunk it computes
  is_foreseen: bool = False  # the controller knows already what will be once it is done
  ending: set[int] = dataclasses.field(default_factory=set)  # requests that it is the last step of


class _Run:
  def __init__(
    self,
    requests: Sequence[Request],
    controller: CacheController,
    policy: Policy,
    executor: Executor,
    serving: ServingConfig,
    recorder: Recorder | None,
    progress: Progress | None,
  ) -> None:
    self.controller, self.policy, self.executor = controller, policy, executor
    self.cap, self.plans_ahead = serving.requests_in_flight, serving.plan_ahead
    self.recorder, self.progress = recorder, progress
    self.zero_s = executor.now_s()
    self.records = {
      r.request_id: RequestRecord(r.request_id, len(r.prompt_ids), r.tenant) for r in requests
    }
    self.result = ServingResult(
      requests=list(self.records.values()),
      steps=[],
      closed_loop=all(r.arrival_s is None for r in requests),
    )
    self.load_times = LoadTimes()
    self.clients = Clients(requests, self.records)
    self.live: dict[int, _Live] = {}
    self.over = 0
    self.under: _Under | None = None
    self.transfers: set[int] = set()  # under way
    self.storage: set[int] = set()  # work of the storage tier under way
    self.prefetching: dict[int, RequestRecord] = {}  # by work id
    self.load_waiters: dict[int, list[RequestRecord]] = {}
    self.releases: list[int] = []  # over, but in the step under way
    self.plan_wanted = False
    self.planned: tuple[SchedulerView, StepPlan] | None = None  # for when the step is done
    self.idle_rounds = 0
    self.wake_at_s: float | None = None

  def run(self) -> ServingResult:
    while True:
      now_s = self._now_s()
      self._give_up(now_s)
      self._let_in(now_s)
      if self.wake_at_s is not None and now_s >= self.wake_at_s:
        self.wake_at_s, self.plan_wanted = None, True
      self._start_storage(now_s)
      if self.under is None and (self.plan_wanted or self.planned is not None):
        self._plan(now_s)
        continue
      if self.under is not None and self.under.is_foreseen:
        self._decide(now_s)
      if self._is_over():
        break
      if self.storage and self.clients.all_came and not (self.live or self.transfers):
        self.executor.flush_storage()  # nothing else will come to be written with the last pages
      until_s = self._next_timer_s()
      if self.under is None and not self.transfers and not self.storage and until_s is None:
        self._deadlock(now_s)
        continue
      for event in self.executor.wait(None if until_s is None else until_s + self.zero_s):
        self._event(event)
        if isinstance(event, SpillHanded | SpillDone):  # nothing can be started for these
          self.plan_wanted = self.plan_wanted or self.planned is not None  # but views show them
          continue
        self.idle_rounds = 0
        if not isinstance(event, StepDone) or self.planned is None:
          self.plan_wanted = True
    self.load_times.settle()
    self.load_times.note(self.result)
    self.result.ended_s = self._now_s()
    return self.result

  def _now_s(self) -> float:
    return self.executor.now_s() - self.zero_s

  # Clients.

  def _give_up(self, now_s: float) -> None:
    for record in self.clients.advance(now_s):
      if record.request_id in self.live:
        self.controller.abort(record.request_id, now_s)
        self.plan_wanted, self.idle_rounds = True, 0
      self._end(record, "aborted", "abort", now_s)

  def _let_in(self, now_s: float) -> None:
    """Takes arrivals into the system, as the cap allows."""
    cap = self.cap if self.under is None else self.cap + len(self.under.ending)
    while len(self.live) < cap and (request := self.clients.next_in(now_s)) is not None:
      request_id, record = request.request_id, self.records[request.request_id]
      record.dispatched_s = now_s
      timed = dataclasses.replace(request, arrival_s=record.arrival_s)
      refusal = self.controller.add(timed, now_s)
      record.match_s = self._now_s() - now_s
      if refusal is not None:
        self._end(record, "refused", refusal, now_s)
        continue
      forced = request.forced_output_ids
      if forced is not None and not len(forced):
        forced = np.zeros(1, np.int32)  # a prefill always samples a token; it is dropped
      self.executor.register(request_id, request.sampling, forced)
      self.live[request_id] = _Live(request, record, self.result.plans)
      self.plan_wanted, self.idle_rounds = True, 0

  def _end(self, record: RequestRecord, outcome: Outcome, reason: str, at_s: float) -> None:
    """The request is over, for its client and for the executor."""
    record.outcome, record.reason, record.over_s = outcome, reason, at_s
    self.over += 1
    request_id = record.request_id
    if self.live.pop(request_id, None) is not None:
      if self.under is None:
        self.executor.release(request_id)
      else:
        self.under.ending.discard(request_id)
        self.releases.append(request_id)
    self.clients.over(request_id, at_s)
    if self.progress is not None:
      self.progress(self.over, len(self.records))

  def _next_timer_s(self) -> float | None:
    next_s = self.clients.next_s
    if next_s is None or self.wake_at_s is None:
      return self.wake_at_s if next_s is None else next_s
    return min(next_s, self.wake_at_s)

  def _is_over(self) -> bool:
    """Whether nothing is left; pending backups are started before that is so."""
    if self.live or self.under or self.transfers or self.storage or not self.clients.all_came:
      return False
    work = self.controller.flush(self._now_s())
    if work is None:
      return True
    self.executor.launch(work)
    self._launched(work, self._now_s())
    return False

  # Plans.

  def _plan(self, now_s: float) -> None:
    """One round: view, plan, apply, launch."""
    self._decide(now_s)
    assert self.planned is not None
    (view, plan), self.planned = self.planned, None
    self.result.plans += 1
    if self.recorder is not None:
      self.recorder(view, plan)
    # Never, or at a time that is over: then waking up would change nothing, again and again.
    wake_at_s = plan.wake_at_s
    self.wake_at_s = wake_at_s if wake_at_s is not None and now_s < wake_at_s < math.inf else None
    applied = self.controller.apply(plan, now_s)
    work = applied.work
    if work is not None:
      self.executor.launch(work)  # before all that is only written down: the device waits for it
    self._note(plan, applied, now_s)
    if work is not None:
      self._launched(work, now_s, view, plan, applied)
      if self.plans_ahead and work.computes:
        self._foresee(now_s)
    if work is not None and (work.computes or work.loads):
      self.idle_rounds = 0
      return
    # A plan that started nothing is followed by another one only if that may be different: after
    # refusals and preemptions, or, when no event is coming, because requests have waited a round.
    waited = plan.deferred or plan.postponed or plan.bypassed or applied.stale
    event_comes = bool(self.transfers or self.storage) or self.wake_at_s is not None
    if applied.refused or applied.preempted or (waited and not event_comes):
      self.idle_rounds += 1
      self.plan_wanted = self.idle_rounds <= _IDLE_ROUNDS

  def _decide(self, now_s: float) -> None:
    """Makes a plan, unless there is one that no event and no time to wake up has overtaken."""
    if self.planned is not None and not self.plan_wanted:
      view, plan = self.planned
      wake_at_s = math.inf if plan.wake_at_s is None else plan.wake_at_s
      if not view.now_s < wake_at_s <= now_s:
        return
    self.plan_wanted = False
    view = self.controller.view(now_s)
    self.planned = view, self.policy(view)

  def _foresee(self, now_s: float) -> None:
    """Takes in what is known of the end of a launched step: the next is planned while it runs.

    Whoever gets the last token makes room for an arrival already.
    """
    assert self.under is not None
    ids = self.controller.foresee()
    self.under.is_foreseen = ids is not None
    for request_id in ids or ():
      live = self.live[request_id]
      if len(live.record.output_ids) + 1 >= live.limit:
        self.controller.finish(request_id, now_s, output_tokens=live.limit)
        self.under.ending.add(request_id)

  def _note(self, plan: StepPlan, applied: Applied, now_s: float) -> None:
    """Writes what a plan decided into the records."""
    bundled = frozenset(plan.bundled)
    self.result.stale += len(applied.stale)
    for deferred in plan.deferred:
      self.records[deferred.request_id].deferrals += 1
    for request_id in plan.postponed:
      self.records[request_id].postponements += 1
    for request_id in applied.preempted:
      live = self.live[request_id]
      live.record.preemptions += 1
      if live.record.output_ids:  # its decode steps computed all of these
        live.computed_to = live.record.prompt_tokens + len(live.record.output_ids)
    for admission in applied.admitted:
      live = self.live[admission.request_id]
      record = live.record
      record.loaded_tokens += admission.load_tokens
      if admission.readmitted:
        continue
      record.admitted_s = now_s
      record.wait_rounds = self.result.plans - live.dispatch_round
      record.device_hit_tokens = admission.device_hit_tokens
      record.host_hit_tokens = admission.host_hit_tokens
      record.storage_hit_tokens = admission.storage_hit_tokens
      record.delay_hit_tokens = admission.delay_hit_tokens
      if admission.request_id in bundled:
        record.bundle_hit_tokens = max(admission.host_hit_tokens - admission.load_tokens, 0)
    for refused in applied.refused:
      self._end(self.records[refused.request_id], "refused", refused.reason, now_s)

  def _launched(
    self,
    work: StepWork,
    now_s: float,
    view: SchedulerView | None = None,
    plan: StepPlan | None = None,
    applied: Applied | None = None,
  ) -> None:
    """Writes down what was launched, before any event of it is taken in."""
    self.transfers.update(load.transfer_id for load in work.loads)
    self.transfers.update(backup.transfer_id for backup in work.backups)
    for load in work.loads:
      live = self.live.get(load.request_id)
      self.load_waiters[load.transfer_id] = [] if live is None else [live.record]
    if work.computes:
      self.load_times.settle()
    self.load_times.launched(work.loads, work.parked_loads, now_s, work.step_id)
    for prefill in work.prefills:
      live = self.live[prefill.request_id]
      end = prefill.start + len(prefill.token_ids)
      live.record.computed_tokens += len(prefill.token_ids)
      live.record.recomputed_tokens += max(min(end, live.computed_to) - prefill.start, 0)
      live.computed_to = max(live.computed_to, end)
      for transfer_id in prefill.waits_for:
        waiters = self.load_waiters.get(transfer_id)
        if waiters is not None and live.record not in waiters:
          waiters.append(live.record)
    chunks = tuple([(len(prefill.token_ids), prefill.start) for prefill in work.prefills])
    row = StepRow(
      step_id=work.step_id,
      started_s=now_s,
      prefill_end_s=now_s,
      ended_s=now_s,
      stall_s=0.0,
      compute_s=0.0,
      prefill_requests=len(work.prefills),
      prefill_tokens=sum([tokens for tokens, _ in chunks]),
      decode_requests=len(work.decodes),
      decode_steps=work.decode_steps if work.decodes else 0,
      load_tokens=sum(load.tokens for load in work.loads),
      backup_tokens=sum(backup.tokens for backup in work.backups),
      parked=0 if plan is None else len(plan.park),
      waiting=0 if view is None else len(view.waiting),
      running=0 if view is None else len(view.running),
      deferred=0 if plan is None else len(plan.deferred),
      postponed=0 if plan is None else len(plan.postponed),
      bundled=0 if plan is None else len(plan.bundled),
      preempted=0 if applied is None else len(applied.preempted),
      stale=0 if applied is None else len(applied.stale),
      prefill_chunks=chunks,
      prefill_context_tokens=sum([start for _, start in chunks]),
      decode_context_tokens=sum([decode.position for decode in work.decodes]),
      load_end_s=None,
    )
    if work.computes:
      first_tokens = frozenset(p.request_id for p in work.prefills if p.samples)
      self.under = _Under(work, row, first_tokens)
    else:
      self.result.steps.append(row)

  def _deadlock(self, now_s: float) -> None:
    """Nothing is under way and nothing will come: whoever is left is refused."""
    self.result.deadlocks += 1
    for request_id in list(self.live):
      record = self.live[request_id].record
      self.controller.abort(request_id, now_s)
      self._end(record, "refused", "deadlock: no plan makes progress any more", now_s)
    self.plan_wanted, self.idle_rounds = False, 0

  # Events.

  def _start_storage(self, now_s: float) -> None:
    """Starts what the storage tier has to do, whatever else is under way."""
    for work in self.controller.storage_work(now_s):
      self.storage.add(work.work_id)
      if isinstance(work, PrefetchWork):
        live = self.live.get(work.look_up.request_id)
        if live is not None:
          self.prefetching[work.work_id] = live.record
      self.executor.launch_storage(work)
      if self.planned is not None:  # what this work moves may be in that plan
        self.plan_wanted = True

  def _storage_event(
    self, event: LookUpDone | PrefetchDone | SpillHanded | SpillDone, at_s: float
  ) -> None:
    if not isinstance(event, SpillHanded):  # its SpillDone comes later
      self.storage.discard(event.work_id)
    record = self.prefetching.pop(event.work_id, None)
    if record is not None and record.admitted_s is None and record.dispatched_s is not None:
      record.prefetch_s = at_s - record.dispatched_s

  def _event(self, event: Event) -> None:
    now_s = self._now_s()
    at_s = event.at_s - self.zero_s
    outputs = self.controller.complete(event, now_s)
    if isinstance(event, StepDone):
      self._step_done(event, outputs)
      return
    if isinstance(event, LookUpDone | PrefetchDone | SpillHanded | SpillDone):
      self._storage_event(event, at_s)
      return
    self.transfers.discard(event.transfer_id)
    if isinstance(event, LoadDone):
      started_s = self.load_times.done(event.transfer_id, at_s)
      for record in self.load_waiters.pop(event.transfer_id):
        record.load_s += at_s - started_s

  def _step_done(self, event: StepDone, outputs) -> None:
    under, self.under = self.under, None
    assert under is not None
    assert under.work.step_id == event.step_id
    started_s, at_s = event.started_s - self.zero_s, event.at_s - self.zero_s
    prefill_end_s = event.prefill_end_s - self.zero_s if under.work.prefills else started_s
    self.load_times.computed(started_s, at_s)
    decoded = (len(event.tokens.get(decode.request_id, ())) for decode in under.work.decodes)
    self.result.steps.append(
      under.row._replace(
        started_s=started_s,
        prefill_end_s=prefill_end_s,
        ended_s=at_s,
        stall_s=event.stall_s,
        compute_s=event.compute_s,
        decode_steps=max(decoded, default=0),
        decode_read_tokens=event.decode_read_tokens,
        joint=event.joint,
      )
    )
    for prefill in under.work.prefills:
      record = self.records[prefill.request_id]
      record.stall_s += event.stall_s
      record.compute_s += event.compute_s
    for request_id in under.first_tokens:
      record = self.records[request_id]
      if record.first_token_s is None and record.outcome == "waiting":
        record.first_token_s = prefill_end_s
    for request_id, indices in event.near_ties.items():
      if request_id in self.live:
        record = self.records[request_id]
        record.near_ties.extend(len(record.output_ids) + i for i in indices)
    for request_id, tokens in outputs:
      live = self.live.get(request_id)
      if live is None:
        continue  # gave up
      output_ids = live.record.output_ids
      output_ids.extend(tokens)
      if live.stop or len(output_ids) >= live.limit:
        first = request_id in under.first_tokens
        is_last = request_id in under.ending
        self._maybe_finish(live, len(tokens), prefill_end_s if first else at_s, is_last)
    while self.releases:
      self.executor.release(self.releases.pop())

  def _maybe_finish(self, live: _Live, new_tokens: int, at_s: float, is_last: bool) -> None:
    """Ends an output at its stop token or limit; `is_last`: the controller has ended it before."""
    record = live.record
    outputs = record.output_ids
    reason = "length"
    end = live.limit if len(outputs) >= live.limit else None
    if live.stop:
      for index in range(len(outputs) - new_tokens, min(len(outputs), live.limit)):
        if outputs[index] in live.stop:
          end, reason = index, "stop"
          break
    if end is None:
      return
    del outputs[end:]
    # A near tie of the token that stopped it is kept: without it the output might go on.
    record.near_ties = [i for i in record.near_ties if i < end or (reason == "stop" and i == end)]
    if not is_last:
      self.controller.finish(record.request_id, self._now_s(), output_tokens=end)
      self.planned = None  # it was planned as if this went on
    self._end(record, "finished", reason, at_s)
