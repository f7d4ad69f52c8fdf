import time

import jax.numpy as jnp
import pytest

from strata_jax.pallas_kernels import timing


def test_it_is_the_mean_time_of_a_call():
  calls = []

  def call():
    calls.append(time.perf_counter())
    time.sleep(0.01)
    return jnp.zeros(1)

  seconds = timing.seconds_a_call(call, calls_s=0.05, rounds=2)
  assert seconds == pytest.approx(0.01, rel=1.0)
  assert seconds >= 0.01
  assert len(calls) >= 3 + 2 * 2  # two to warm up, one to see how long it takes, then two rounds
