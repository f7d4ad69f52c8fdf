import numpy as np
import pytest

from strata_jax.executors.protocol import LoadWork
from strata_jax.load_times import LoadTimes


def _load(transfer_id):
  slots = np.array([0], np.int32)
  return LoadWork(
    transfer_id=transfer_id,
    request_id=0,
    node_ids=(1,),
    host_slots=slots,
    device_slots=slots,
    tokens=1,
  )


def test_busy_time_is_the_union_of_the_loads():
  times = LoadTimes()
  times.launched([_load(1), _load(2)], (), 1.0)
  assert times.done(1, 2.0) == 1.0
  times.launched([_load(3)], (), 2.5)
  assert times.done(2, 3.0) == 1.0
  assert times.done(3, 4.0) == 2.5
  times.launched([_load(4)], (), 10.0)
  times.done(4, 10.5)
  assert times.busy_s == 3.5
  assert times.bubble_s == times.parked_stall_s == 0.0


def test_parked_loads_are_covered_where_steps_computed():
  times = LoadTimes()
  times.launched([_load(1), _load(2)], (1, 2), 1.0)
  times.computed(0.5, 1.5)  # half of it in the park
  times.done(1, 2.0)
  times.computed(2.0, 3.0)
  times.done(2, 4.0)
  times.computed(3.5, 6.0)  # half a second of it
  times.settle()
  assert times.bubble_s == pytest.approx(0.5 + 1.0 + 0.5)
  assert times.parked_stall_s == pytest.approx(1.0)
  times.computed(7.0, 8.0)
  times.settle()
  assert times.bubble_s == pytest.approx(2.0)


def test_a_park_that_still_loads_is_not_counted_yet():
  times = LoadTimes()
  times.launched([_load(1)], (1,), 0.0)
  times.computed(0.0, 1.0)
  times.settle()
  assert times.bubble_s == 0.0
  times.done(1, 1.0)
  times.settle()
  assert (times.bubble_s, times.parked_stall_s) == (1.0, 0.0)
