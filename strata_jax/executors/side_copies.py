"""Transfers by the CUDA driver beside everything else: no program of the compute waits for them.

That is right for two kinds. A backup's pages were written by steps that are over, or by a load that
it waits for here, and nothing writes them before it is done. A parked load's pages are nobody's
before it is done: the executor launches nothing that reads them (`staged_loads` is the faster way
for those, this one copies fragments as published systems do). So their copies need no order with
the compute: they run on a stream of their own. A thread submits them and waits for them.

The inputs of a step get across the link when the driver has run out of copies, whatever stream they
stand in. So it runs out of a load's between two calls.
"""

import queue
from collections.abc import Callable

import numpy as np

from strata_jax.executors import fragment_copies, workers
from strata_jax.tiers import cuda_copies

# Smaller fragments are faster by the kernel, even though it takes turns with the compute.
SMALLEST_FRAGMENT_BYTES = 32 << 10
# Pages in one call of the driver: of a few, those of many layers go together, since what a call
# costs is Python, which whoever launches waits for. A layer of many pages is a call of its own.
_PAGES_AT_ONCE = 256

# Called once all bytes are there, or with the error that kept them.
Done = Callable[[BaseException | None], None]


class SideCopies:
  """Copies pages between the pools in one direction, one transfer after the other."""

  def __init__(self, copies: fragment_copies.FragmentCopies, *, to_device: bool) -> None:
    """Makes a stream and a thread."""
    side = cuda_copies.SideStream()
    jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
    self._jobs = jobs
    workers.start(self, _work, jobs, copies, side, to_device)

  def start(
    self,
    host_slots: np.ndarray,
    device_slots: np.ndarray,
    done: Done,
    ready: Callable[[], object] = lambda: None,
  ) -> None:
    """Starts the copies of some pages, int32 [pages] both, once `ready` has returned.

    Both functions are called in the thread.
    """
    self._jobs.put((host_slots, device_slots, done, ready))


_Job = tuple[np.ndarray, np.ndarray, Done, Callable[[], object]]


def _work(
  jobs: "queue.SimpleQueue[_Job | None]",
  copies: fragment_copies.FragmentCopies,
  side: cuda_copies.SideStream,
  to_device: bool,
) -> None:
  while (job := jobs.get()) is not None:
    host_slots, device_slots, done, ready = job
    error: BaseException | None = None
    try:
      ready()
      at_once = max(1, _PAGES_AT_ONCE // max(1, len(host_slots)))
      for some in copies.by_layer(
        host_slots, device_slots, to_device=to_device, layers_at_once=at_once
      ):
        copies.submit(some, side.stream)
        if to_device:
          side.synchronize()
      side.synchronize()
    except BaseException as found:  # whoever waits for the transfer must hear of it
      error = found
    done(error)
    del job, host_slots, device_slots, done, ready  # nothing stays alive without anything to do
