"""When the parts of a step happen on a virtual clock: two links, one compute stream.

A prefill pass with loads is a pipeline over layers: layer l computes once layer l - 1 has and once
the loads of layer l are there. The loads of a launch share the link layer by layer, so that all
of them end together; transfers of later launches wait behind them. Parked loads that the driver
copies come one after the other. Where its shapes allow it and no
loads ride with it, a prefill is in one pass with the first decode step, whose head comes last;
loads beside slow it as they slow a prefill.

What a real executor cannot do beside each other (`profile.ExecutorCosts`) follows each other here:
launches come a gap after the decision, backups may hold up what is launched with or after them, and
with `loads_hold_compute` so do loads: whole ones of earlier launches, a step's own layer by layer.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from strata_jax.cost_model import CostModel
from strata_jax.executors.protocol import LoadWork, StepWork
from strata_jax.executors.step_shapes import can_join


class StepTimes(NamedTuple):
  """A launched step: when its transfers are done and when its prefill is."""

  transfers: Mapping[int, float]  # transfer id: done at
  started_s: float
  prefill_end_s: float
  compute_s: float  # prefill without waiting
  stall_s: float
  # Prefill and first decode step in one pass: when that ends; None: decodes follow the prefill.
  first_decode_end_s: float | None = None


class Timeline(Protocol):
  """Gives times to launched work. Called in the order of launches."""

  def start(self, work: StepWork, now_s: float, read_tokens: int = 0) -> StepTimes:
    """Launches at `now_s`; a first decode step beside prefills reads so many tokens' KV."""
    ...

  def decode_end_s(self, step_id: int, start_s: float, requests: int, read_tokens: int) -> float:
    """When one decode step that starts at `start_s` ends; it reads so many tokens' KV."""
    ...

  def forget(self, transfer_id: int) -> None:
    """The transfer is done and was reported: who waits for it later need not wait."""
    ...


class _Transfer(NamedTuple):
  start_s: float
  end_s: float


@dataclasses.dataclass(slots=True)
class LinkUse:
  """What went over one direction of the link."""

  free_at_s: float = 0.0
  busy_s: float = 0.0
  bytes_moved: float = 0.0


class CostTimeline:
  """Times from a cost model."""

  def __init__(self, costs: CostModel) -> None:
    self.costs = costs
    self.down = LinkUse()  # host -> device
    self.up = LinkUse()  # device -> host
    self.compute_busy_s = 0.0
    self._executor = costs.profile.executor
    self._loads: dict[int, _Transfer] = {}  # those that a later step may wait for
    self._hold_s = 0.0  # launches begin no sooner
    self._decode_from_s = 0.0  # decode steps start no sooner,
    self._decode_hold_s = 0.0  # and one that starts sooner than this ends no sooner

  def start(self, work: StepWork, now_s: float, read_tokens: int = 0) -> StepTimes:
    done: dict[int, float] = {}
    if work.computes or work.loads:
      now_s += self._executor.step_gap_s
    begin_s = now_s
    for backup in work.backups:
      pages = len(backup.device_slots)
      start_s = max(now_s, self.up.free_at_s)
      end_s = self._use(self.up, start_s, self.costs.backup_s(pages), pages)
      done[backup.transfer_id] = end_s
      if backup.evicts:  # its device slots are written by this step
        begin_s = max(begin_s, end_s)
      self._hold_s = max(self._hold_s, now_s) + self.costs.backup_hold_s(pages)
    held_s = max(0.0, self._hold_s - begin_s)
    parked = set(work.parked_loads)
    own = [load for load in work.loads if load.transfer_id not in parked]
    aside = [load for load in work.loads if load.transfer_id in parked]
    self._load_group(own, begin_s + held_s, done)
    self._load_group(aside, begin_s + held_s, done, in_turn=self.costs.parked_in_turn)
    compute_start_s = begin_s + held_s
    if self.costs.io.overlap == "none" and work.loads:
      compute_start_s = max(compute_start_s, self.down.free_at_s)
    if self._executor.loads_hold_compute:
      compute_start_s = self._held_by_loads(work, compute_start_s)
    if held_s or self._executor.loads_hold_compute:
      self._decode_from_s = compute_start_s
    if not work.prefills:
      return StepTimes(done, begin_s, compute_start_s, 0.0, 0.0)
    waits = self._waits(work, compute_start_s)
    decodes = len(work.decodes) if self._is_joint(work, waits) else 0
    end_s, compute_s = self._prefill(work, compute_start_s, waits, decodes, read_tokens)
    compute_s += held_s
    self.compute_busy_s += compute_s
    stall_s = max(0.0, end_s - begin_s - compute_s)
    if not decodes:
      return StepTimes(done, begin_s, end_s, compute_s, stall_s)
    decoded_s = self._advance(end_s, self.costs.head_s(decodes), self.costs.interference.prefill)
    self.compute_busy_s += decoded_s - end_s
    return StepTimes(done, begin_s, end_s, compute_s, stall_s, decoded_s)

  def decode_end_s(self, step_id: int, start_s: float, requests: int, read_tokens: int) -> float:
    start_s = max(start_s, self._decode_from_s)
    work_s = self.costs.decode_step_s(requests, read_tokens)
    end_s = self._advance(start_s, work_s, self.costs.interference.decode)
    if start_s < self._decode_hold_s:
      end_s = max(end_s, self._decode_hold_s)
    self.compute_busy_s += end_s - start_s
    return end_s

  def _held_by_loads(self, work: StepWork, start_s: float) -> float:
    """When compute starts that waits for the loads before it, its own by layer if they overlap."""
    own = {load.transfer_id for load in work.loads}
    layerwise = self.costs.io.overlap == "layer"
    for transfer_id, load in self._loads.items():
      if transfer_id not in own or not layerwise:
        start_s = max(start_s, load.end_s)
    if layerwise and work.loads:
      self._decode_hold_s = max(self._loads[transfer_id].end_s for transfer_id in own)
    return start_s

  def _load_group(
    self, loads: list[LoadWork], begin_s: float, done: dict[int, float], *, in_turn: bool = False
  ) -> None:
    """Loads that share the link layer by layer, or use it one after the other."""
    if not loads:
      return
    pages = sum(len(load.host_slots) for load in loads)
    start_s = max(begin_s, self.down.free_at_s)
    seconds = self.costs.load_s(pages)
    if seconds == 0.0:  # free loads occupy no link
      start_s = end_s = begin_s
    else:
      end_s = self._use(self.down, start_s, seconds, pages)
    moved = 0
    for load in loads:
      moved += len(load.host_slots)
      # The last one ends with the group; in turn each begins where the one before ends.
      came_s = end_s - (pages - moved) * self.costs.page_load_s() if in_turn else end_s
      done[load.transfer_id] = came_s
      self._loads[load.transfer_id] = _Transfer(start_s, came_s)
      start_s = came_s if in_turn else start_s

  def _use(self, link: LinkUse, start_s: float, seconds: float, pages: int) -> float:
    link.free_at_s = start_s + seconds
    link.busy_s += seconds
    link.bytes_moved += pages * self.costs.io.page_size * self.costs.token_bytes()
    return link.free_at_s

  def _waits(self, work: StepWork, start_s: float) -> set[_Transfer]:
    """The loads that a prefill which starts then waits for."""
    waits = {
      self._loads[transfer]
      for prefill in work.prefills
      for transfer in prefill.waits_for
      if transfer in self._loads
    }
    if self._executor.loads_hold_compute:
      waits.update(self._loads[load.transfer_id] for load in work.loads)
    return {wait for wait in waits if wait.end_s > start_s}

  def _is_joint(self, work: StepWork, waits: set[_Transfer]) -> bool:
    """Whether the prefill and the first decode step are one pass.

    Not where loads come layer by layer with the compute. Whole ones are there before it begins.
    """
    buckets, io = self.costs.buckets, self.costs.io
    if buckets is None or not work.decodes:
      return False
    own_loads = len(work.loads) > len(work.parked_loads) and not io.load_is_free
    if io.overlap == "layer" and (waits or own_loads):
      return False
    return can_join(_chunks(work), buckets)

  def _prefill(
    self, work: StepWork, start_s: float, waits: set[_Transfer], decodes: int, read_tokens: int
  ) -> tuple[float, float]:
    """(end, compute seconds) of the prefill pass, which so many decodes are in."""
    costs = self.costs
    layer_s = costs.prefill_layer_s(_chunks(work), decodes, read_tokens if decodes else 0)
    if waits:
      layer_s += costs.profile.hardware.gate_s
    layers = costs.layers
    slowdown = costs.interference.prefill
    at_s, compute_s = start_s, 0.0
    layerwise = costs.io.overlap == "layer"
    for layer in range(1, layers + 1):
      ready_s = at_s
      for wait in waits:
        share = layer / layers if layerwise else 1.0
        ready_s = max(ready_s, wait.start_s + share * (wait.end_s - wait.start_s))
      at_s = self._advance(ready_s, layer_s, slowdown)
      compute_s += at_s - ready_s
    samples = sum(1 for prefill in work.prefills if prefill.samples)
    end_s = self._advance(at_s, costs.prefill_tail_s(samples), slowdown)
    return end_s, compute_s + end_s - at_s

  def _advance(self, start_s: float, work_s: float, slowdown: float) -> float:
    """When `work_s` of undisturbed compute is done that runs slower while the link loads."""
    busy_s = self.down.free_at_s - start_s
    if busy_s <= 0.0 or slowdown == 0.0:
      return start_s + work_s
    slowed_s = work_s * (1.0 + slowdown)
    if slowed_s <= busy_s:
      return start_s + slowed_s
    return start_s + busy_s + (work_s - busy_s / (1.0 + slowdown))

  def forget(self, transfer_id: int) -> None:
    self._loads.pop(transfer_id, None)


def _chunks(work: StepWork) -> list[tuple[int, int]]:
  """(new tokens, tokens before) of its prefills."""
  return [(len(prefill.token_ids), prefill.start) for prefill in work.prefills]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedStep:
  started_s: float
  prefill_end_s: float
  at_s: float
  compute_s: float = 0.0
  stall_s: float = 0.0


class RecordedTimeline:
  """Times that another executor took, by step and transfer id: for differential tests.

  Raises KeyError when asked for a step or transfer that the record does not have, which means that
  decisions differed.
  """

  def __init__(self, steps: Mapping[int, RecordedStep], transfers: Mapping[int, float]) -> None:
    self._steps = steps
    self._transfers = transfers

  def start(self, work: StepWork, now_s: float, read_tokens: int = 0) -> StepTimes:
    done = {
      transfer.transfer_id: self._transfers[transfer.transfer_id]
      for transfer in (*work.loads, *work.backups)
    }
    if not work.computes:
      return StepTimes(done, now_s, now_s, 0.0, 0.0)
    step = self._steps[work.step_id]
    # Without decodes the step ends with its prefills, which the other executor heard of before.
    prefill_end_s = step.prefill_end_s if work.decodes else step.at_s
    return StepTimes(done, step.started_s, prefill_end_s, step.compute_s, step.stall_s)

  def decode_end_s(self, step_id: int, start_s: float, requests: int, read_tokens: int) -> float:
    return self._steps[step_id].at_s

  def forget(self, transfer_id: int) -> None:
    """Nothing to forget."""


class InstantTimeline:
  """Everything happens at once: to fill a cache before a run begins."""

  def start(self, work: StepWork, now_s: float, read_tokens: int = 0) -> StepTimes:
    done = {transfer.transfer_id: now_s for transfer in (*work.loads, *work.backups)}
    return StepTimes(done, now_s, now_s, 0.0, 0.0)

  def decode_end_s(self, step_id: int, start_s: float, requests: int, read_tokens: int) -> float:
    return start_s

  def forget(self, transfer_id: int) -> None:
    """Nothing to forget."""
