"""How long the device waits for the host between steps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from strata_jax.executors.protocol import (
  Event,
  Executor,
  SamplingParams,
  StepDone,
  StepWork,
  StorageWork,
)


class HostTimes(NamedTuple):
  """Host time around the launch of one computing step."""

  gap_s: float | None  # the step before was done, nothing launched yet; None: it waited for others
  step_s: float | None  # from hearing of the step before to the end of the launch; None likewise
  launch_s: float  # the launch alone; where it reads parked loads, with the wait for them


class HostTimer:
  """An executor that passes everything on and notes when steps end and are launched."""

  def __init__(self, executor: Executor) -> None:
    """Takes the executor whose clock counts."""
    self._executor = executor
    self._done_s: float | None = None
    self._heard_s = 0.0
    self.times: dict[int, HostTimes] = {}  # by step id

  def now_s(self) -> float:
    """See `Executor`."""
    return self._executor.now_s()

  def register(
    self, request_id: int, sampling: SamplingParams, forced_output_ids: np.ndarray | None
  ) -> None:
    """See `Executor`."""
    self._executor.register(request_id, sampling, forced_output_ids)

  def release(self, request_id: int) -> None:
    """See `Executor`."""
    self._executor.release(request_id)

  def launch(self, work: StepWork) -> None:
    """See `Executor`."""
    began_s = self.now_s()
    self._executor.launch(work)
    if not work.computes:
      return
    ended_s = self.now_s()
    gap_s = step_s = None
    if self._done_s is not None:
      gap_s, step_s = began_s - self._done_s, ended_s - self._heard_s
      self._done_s = None
    self.times[work.step_id] = HostTimes(gap_s, step_s, ended_s - began_s)

  def launch_storage(self, work: StorageWork) -> None:
    """See `Executor`."""
    self._executor.launch_storage(work)

  def flush_storage(self) -> None:
    """See `Executor`."""
    self._executor.flush_storage()

  def wait(self, until_s: float | None) -> list[Event]:
    """See `Executor`."""
    self._done_s = None  # nothing was to be launched: what comes next is no overhead
    events = self._executor.wait(until_s)
    for event in events:
      if isinstance(event, StepDone):
        self._done_s, self._heard_s = event.at_s, self.now_s()
    return events

  def summary(self) -> dict[str, Any]:
    """Medians and 99th percentiles in ms; None where no step followed another at once."""
    result: dict[str, Any] = {}
    for name in ("gap", "step", "launch"):
      values = [getattr(times, f"{name}_s") for times in self.times.values()]
      known = [1e3 * value for value in values if value is not None]
      result[f"host_{name}_ms_median"] = _percentile(known, 50)
      result[f"host_{name}_ms_p99"] = _percentile(known, 99)
    result["host_gap_s"] = sum(times.gap_s or 0.0 for times in self.times.values())
    return result


def _percentile(values: Sequence[float], percent: float) -> float | None:
  return float(np.percentile(values, percent)) if values else None
