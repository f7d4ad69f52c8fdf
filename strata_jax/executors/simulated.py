"""The executor of the simulation: a virtual clock, forced outputs, times from a timeline.

Deterministic: the same launches and waits give the same events at the same times, bit for bit.
"""

import dataclasses
import heapq

import numpy as np

from strata_jax.executors.protocol import (
  BackupDone,
  Event,
  LoadDone,
  SamplingParams,
  StepDone,
  StepWork,
  StorageWork,
)
from strata_jax.executors.shared_reads import read_tokens
from strata_jax.executors.simulated_storage import SimulatedStorage
from strata_jax.executors.timeline import StepTimes, Timeline


@dataclasses.dataclass(slots=True, eq=False)
class _Outputs:
  """The forced output of a request and how much of it was given out."""

  ids: list[int]
  given: int = 0

  @property
  def left(self) -> int:
    return len(self.ids) - self.given

  def take(self, count: int) -> tuple[int, ...]:
    start, self.given = self.given, self.given + count
    return tuple(self.ids[start : self.given])


@dataclasses.dataclass(slots=True, eq=False)
class _Step:
  """The computing step under way; its decode steps are timed only as far as time has come."""

  work: StepWork
  times: StepTimes
  at_s: float  # end of the last part that was timed
  decode_steps: int  # at most
  first_read: int  # tokens whose KV the first of them reads
  decoded: int = 0
  read_tokens: int = 0  # by these steps
  is_fixed: bool = False  # its end is in the queue of events


class SimulatedExecutor:
  """Carries out steps on a virtual clock.

  A step with several decode steps ends early, at the first boundary of a decode step at or after
  anything that a scheduler could react to: an event, the time that `wait` is called until (the next
  arrival), or the end of an output. So it does what the same number of single steps would do, as
  long as nothing waits to be scheduled. With `whole_decodes` it does all that a plan asks for, as a
  real executor does.

  Decode steps read what up to `decode_shares` rows have in common once (`shared_reads`), in pages
  of `page_size` tokens.
  """

  def __init__(
    self,
    timeline: Timeline,
    storage: SimulatedStorage | None = None,
    *,
    whole_decodes: bool = False,
    decode_shares: int = 1,
    page_size: int = 1,
  ) -> None:
    self._timeline = timeline
    self._whole_decodes = whole_decodes
    self._decode_shares, self._page_size = decode_shares, page_size
    self._storage = storage
    self._now_s = 0.0
    self._events: list[tuple[float, int, Event]] = []  # heap of (time, order, event)
    self._order = 0
    self._outputs: dict[int, _Outputs] = {}
    self._step: _Step | None = None

  def now_s(self) -> float:
    return self._now_s

  def register(
    self, request_id: int, sampling: SamplingParams, forced_output_ids: np.ndarray | None
  ) -> None:
    """Raises ValueError without forced ids: a simulation has no model to ask."""
    if forced_output_ids is None:
      raise ValueError(f"request {request_id}: expected forced_output_ids in a simulation")
    self._outputs[request_id] = _Outputs(ids=forced_output_ids.tolist())

  def release(self, request_id: int) -> None:
    self._outputs.pop(request_id, None)

  def launch(self, work: StepWork) -> None:
    """Raises RuntimeError when a computing step is under way already."""
    if work.computes and self._step is not None:
      raise RuntimeError(f"step {work.step_id}: step {self._step.work.step_id} is still under way")
    first_read = self._read_tokens(work, 0)
    times = self._timeline.start(work, self._now_s, first_read)
    for backup in work.backups:
      at_s = times.transfers[backup.transfer_id]
      self._push(BackupDone(backup.transfer_id, at_s))
    for load in work.loads:
      self._push(LoadDone(load.transfer_id, times.transfers[load.transfer_id]))
    if not work.computes:
      return
    decode_steps = 0
    if work.decodes:
      left = min([self._outputs[decode.request_id].left for decode in work.decodes])
      decode_steps = max(1, min(work.decode_steps, left))
    at_s = times.prefill_end_s if work.prefills else times.started_s
    step = _Step(
      work=work, times=times, at_s=at_s, decode_steps=decode_steps, first_read=first_read
    )
    if times.first_decode_end_s is not None:
      step.at_s, step.decoded, step.read_tokens = times.first_decode_end_s, 1, first_read
    self._step = step
    if not decode_steps:
      self._finish_step()

  def launch_storage(self, work: StorageWork) -> None:
    """Raises ValueError without a storage tier."""
    if self._storage is None:
      raise ValueError("work of a storage tier: there is none")
    for event in self._storage.start(work, self._now_s):
      self._push(event)

  def flush_storage(self) -> None:
    """Nothing lingers here."""

  def wait(self, until_s: float | None) -> list[Event]:
    """The next events, all of one time; none when `until_s` comes first.

    Raises RuntimeError when there is nothing to wait for.
    """
    if self._step is not None and not self._step.is_fixed:
      self._decode(until_s)
    next_s = self._events[0][0] if self._events else None
    if until_s is not None and (next_s is None or until_s < next_s):
      self._now_s = max(self._now_s, until_s)
      return []
    if next_s is None:
      raise RuntimeError("wait: expected work under way or a time, got neither")
    self._now_s = max(self._now_s, next_s)
    events: list[Event] = []
    while self._events and self._events[0][0] <= next_s:
      event = heapq.heappop(self._events)[2]
      if isinstance(event, LoadDone):
        self._timeline.forget(event.transfer_id)
      elif isinstance(event, StepDone):
        self._step = None
      events.append(event)
    return events

  def _decode(self, until_s: float | None) -> None:
    """Times decode steps up to the first boundary at which something may happen."""
    step = self._step
    assert step is not None
    horizon_s = self._events[0][0] if self._events else None
    if self._whole_decodes:
      horizon_s = until_s = None
    if until_s is not None and (horizon_s is None or until_s < horizon_s):
      horizon_s = until_s
    requests = len(step.work.decodes)
    while step.decoded < step.decode_steps:
      if step.decoded and horizon_s is not None and step.at_s >= horizon_s:
        break
      read = self._read_tokens(step.work, step.decoded) if step.decoded else step.first_read
      step.at_s = self._timeline.decode_end_s(step.work.step_id, step.at_s, requests, read)
      step.read_tokens += read
      step.decoded += 1
    self._finish_step()

  def _read_tokens(self, work: StepWork, decoded: int) -> int:
    """Tokens whose KV the decode step after `decoded` ones reads."""
    tables = [decode.page_table for decode in work.decodes]
    tokens = [decode.position + 1 + decoded for decode in work.decodes]
    return read_tokens(tables, tokens, width=self._decode_shares, page_size=self._page_size)

  def _finish_step(self) -> None:
    step = self._step
    assert step is not None
    step.is_fixed = True
    tokens = {
      prefill.request_id: self._outputs[prefill.request_id].take(1)
      for prefill in step.work.prefills
      if prefill.samples
    }
    for decode in step.work.decodes:
      tokens[decode.request_id] = self._outputs[decode.request_id].take(step.decoded)
    times = step.times
    self._push(
      StepDone(
        step.work.step_id, times.started_s, step.at_s, tokens,
        prefill_end_s=times.prefill_end_s if step.work.prefills else 0.0,
        compute_s=times.compute_s, stall_s=times.stall_s, decode_read_tokens=step.read_tokens,
        joint=times.first_decode_end_s is not None,
      )
    )  # fmt: skip

  def _push(self, event: Event) -> None:
    heapq.heappush(self._events, (event.at_s, self._order, event))
    self._order += 1
