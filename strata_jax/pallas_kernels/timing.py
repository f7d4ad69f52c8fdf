"""Timing of calls that the device carries out in order."""

import time
from collections.abc import Callable

import jax
import numpy as np


def seconds_a_call(call: Callable[[], object], *, calls_s: float = 0.1, rounds: int = 3) -> float:
  """Median over rounds of the mean time of calls that follow each other without waiting.

  Waiting for one call alone adds up to 0.5 ms of waking up, more than small transfers take, and a
  server does not wait for each either. Two calls come first: only the second meets the kinds of
  arrays that all later ones meet.

  Args:
    call: dispatches the work and returns arrays that are ready when it is done.
    calls_s: how long a round takes, about.
    rounds: how many.
  """
  for _ in range(2):
    jax.block_until_ready(call())
  started_s = time.perf_counter()
  jax.block_until_ready(call())
  number = int(min(100, max(2, calls_s / (time.perf_counter() - started_s))))
  times = []
  for _ in range(rounds):
    started_s = time.perf_counter()
    for _ in range(number - 1):
      call()
    jax.block_until_ready(call())
    times.append((time.perf_counter() - started_s) / number)
  return float(np.median(times))
