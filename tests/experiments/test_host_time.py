import pytest

from experiments.host_time import HostTimer
from strata_jax.executors.protocol import LoadDone, PrefillWork, StepDone, StepWork

_PREFILL = PrefillWork(request_id=0, token_ids=None, start=0, page_table=None, samples=True)


class _Clock:
  """An executor on a clock that the test sets; a launch takes 2 s."""

  def __init__(self):
    self.time_s = 0.0
    self.events = []

  def now_s(self):
    return self.time_s

  def launch(self, work):
    self.time_s += 2.0

  def wait(self, until_s):
    return self.events.pop(0)


def test_a_gap_is_from_the_end_of_a_step_to_the_next_launch():
  clock = _Clock()
  timer = HostTimer(clock)
  timer.launch(StepWork(step_id=0, prefills=(_PREFILL,)))
  clock.time_s = 10.0
  clock.events = [[StepDone(0, 2.0, 9.5, {})]]
  timer.wait(None)
  clock.time_s = 11.0
  timer.launch(StepWork(step_id=1, loads=()))  # moves only
  timer.launch(StepWork(step_id=2, prefills=(_PREFILL,)))
  assert timer.times[0] == (None, None, 2.0)
  assert 1 not in timer.times
  assert timer.times[2] == (13.0 - 9.5, 15.0 - 10.0, 2.0)
  summary = timer.summary()
  assert summary["host_gap_ms_median"] == pytest.approx(3500.0)
  assert summary["host_step_ms_p99"] == pytest.approx(5000.0)
  assert summary["host_launch_ms_median"] == pytest.approx(2000.0)


def test_waiting_for_arrivals_or_loads_is_no_overhead():
  clock = _Clock()
  timer = HostTimer(clock)
  clock.events = [[StepDone(0, 0.0, 0.0, {})], [], [LoadDone(3, 5.0)]]
  timer.wait(None)
  timer.wait(5.0)
  clock.time_s = 5.0
  timer.wait(None)
  timer.launch(StepWork(step_id=1, prefills=(_PREFILL,)))
  assert timer.times[1].gap_s is None
  assert timer.summary()["host_gap_ms_median"] is None
