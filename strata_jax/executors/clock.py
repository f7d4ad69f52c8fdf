"""The clock of a run."""

import time


class Clock:
  """Seconds since it was made or restarted."""

  def __init__(self) -> None:
    self._origin_s = time.perf_counter()

  def restart(self) -> None:
    """Begins at 0 again."""
    self._origin_s = time.perf_counter()

  def now_s(self) -> float:
    """What time it is."""
    return time.perf_counter() - self._origin_s

  def at_s(self, perf_counter_s: float) -> float:
    """What time it was at a time by `time.perf_counter`."""
    return perf_counter_s - self._origin_s
