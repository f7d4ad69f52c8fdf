"""How long loads ran, and how much of the time of parked loads other work covered."""

import dataclasses
from collections.abc import Collection, Iterable

from strata_jax.executors.protocol import LoadWork
from strata_jax.metrics import ServingResult


@dataclasses.dataclass(slots=True)
class _Park:
  """The loads of one parked batch."""

  started_s: float
  left: set[int]  # transfer ids under way
  ended_s: float | None = None


class LoadTimes:
  """Fed with launches and completions in time order.

  `busy_s`: at least one load ran. `bubble_s`: parked loads ran and computing steps did too;
  `parked_stall_s`: parked loads ran and nothing computed. `ends_s`: by step id, when the last load
  had come that the step launched.
  """

  def __init__(self) -> None:
    self.busy_s = 0.0
    self.bubble_s = 0.0
    self.parked_stall_s = 0.0
    self.ends_s: dict[int, float] = {}
    self._started_s: dict[int, tuple[float, int]] = {}  # with the step that launched it
    self._busy_since_s = 0.0
    self._parks: list[_Park] = []
    self._computed: list[tuple[float, float]] = []  # steps since the oldest unsettled park began

  def launched(
    self, loads: Iterable[LoadWork], parked: Collection[int], now_s: float, step_id: int = 0
  ) -> None:
    """A step launched loads; the transfer ids in `parked` belong to a parked batch."""
    for load in loads:
      if not self._started_s:
        self._busy_since_s = now_s
      self._started_s[load.transfer_id] = now_s, step_id
    if parked:
      self._parks.append(_Park(now_s, set(parked)))

  def done(self, transfer_id: int, at_s: float) -> float:
    """A load has arrived; returns when it was launched."""
    started_s, step_id = self._started_s.pop(transfer_id)
    self.ends_s[step_id] = at_s
    if not self._started_s:
      self.busy_s += at_s - self._busy_since_s
    for park in self._parks:
      park.left.discard(transfer_id)
      if not park.left and park.ended_s is None:
        park.ended_s = at_s
    return started_s

  def computed(self, started_s: float, ended_s: float) -> None:
    """A computing step is over."""
    if self._parks:
      self._computed.append((started_s, ended_s))

  def settle(self) -> None:
    """No computing step is under way: parks whose loads have arrived are counted."""
    open_parks = []
    for park in self._parks:
      if park.ended_s is None:
        open_parks.append(park)
        continue
      covered_s = sum(
        max(min(end, park.ended_s) - max(start, park.started_s), 0.0)
        for start, end in self._computed
      )
      self.bubble_s += covered_s
      self.parked_stall_s += max(park.ended_s - park.started_s - covered_s, 0.0)
    self._parks = open_parks
    if not open_parks:
      self._computed.clear()

  def note(self, result: ServingResult) -> None:
    """Writes all of it into a run's result."""
    result.load_busy_s = self.busy_s
    result.bubble_s = self.bubble_s
    result.parked_stall_s = self.parked_stall_s
    ends_s = self.ends_s
    result.steps = [
      row._replace(load_end_s=ends_s[row.step_id]) if row.step_id in ends_s else row
      for row in result.steps
    ]
