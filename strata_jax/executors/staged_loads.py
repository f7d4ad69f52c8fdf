"""Parked loads as whole pages by the copy engine, spread over the layers once they are there.

A page is one piece on the host and a fragment a layer on the device. A driver that copies fragments
has 32 times as many copies to be given as one that copies pages (Llama-3.1-8B), and whoever gives
them to it keeps the compute's own launches waiting. Nobody reads the pages of a parked load before
it is done, so it can go the long way round: whole pages into a buffer in device memory, beside all
compute, then from there into the pools, in the compute's stream, at the speed of device memory.

The inputs of every step cross the link, too, and do not get there before the driver runs out of
copies, whatever stream they stand in. So it is given a few at a time, and runs out often.
"""

import dataclasses
import queue
import threading
import time
import weakref
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.executors import programs, watcher, workers
from strata_jax.pallas_kernels.layout_convert import api as layout_convert
from strata_jax.tiers import cuda_copies, io_backend, layout

BUFFER_BYTES = 1 << 30
SLICE_BYTES = 64 << 20  # given to the driver at once
BUFFERS = 4  # one is filled while others wait for the step under way, to be emptied behind it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arrived(watcher.Internal):
  """A part of a load is in a buffer: it is to be handed to `StagedLoads.spread`."""

  transfer_id: int
  buffer: int
  device_slots: np.ndarray  # int32 [pages]
  is_last: bool  # of its load
  at_s: float  # by `time.perf_counter`


Post = Callable[[Arrived | BaseException], None]


class StagedLoads:
  """Loads in the order of their start, in parts of at most a buffer."""

  def __init__(
    self,
    page_layout: layout.PageLayout,
    host: io_backend.HostPool,
    device: jax.Device,
    *,
    table_pages: int,
  ) -> None:
    """Makes the buffers, a stream and a thread.

    Args:
      page_layout: of the pools.
      host: the host pool. It never moves: its address is taken here.
      device: where the pools of the layers are.
      table_pages: the longest load; no buffer is larger.
    """
    self._pages = max(1, min(table_pages, BUFFER_BYTES // page_layout.page_bytes))
    self._device = device
    self._buffers = tuple(
      jnp.zeros(page_layout.host_shape(self._pages), page_layout.dtype, device=device)
      for _ in range(BUFFERS)
    )  # [pages, layers, *fragment] each
    spread = lambda buffer, pools, slots, count: layout_convert.pages_to_layers(
      buffer, pools, slots, count,
      implementation="mosaic_gpu" if device.platform == "gpu" else "reference",
    )  # fmt: skip
    self._spread = jax.jit(spread, donate_argnums=1)
    # Returns when all parts that were spread by now are in the pools.
    self.spread_over: Callable[[], object] = lambda: None
    self._free: queue.SimpleQueue[_Free | None] = queue.SimpleQueue()
    for index, buffer in enumerate(self._buffers):
      self._free.put((index, buffer.block_until_ready))
    jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
    self._jobs = jobs
    over = threading.Event()
    weakref.finalize(self, _end, over, self._free)
    copier = _Copier(
      host_at=host.unsafe_buffer_pointer(), buffers=self._buffers, page_bytes=page_layout.page_bytes
    )
    workers.start(self, _work, jobs, self._free, over, copier, self._pages)

  def parts(self, pages: int) -> int:
    """How many times `post` will be called for a load of so many pages."""
    return max(1, -(-pages // self._pages))

  def start(
    self, transfer_id: int, host_slots: np.ndarray, device_slots: np.ndarray, post: Post
  ) -> None:
    """Starts a load, int32 [pages] both; `post` is called in the thread, or once with an error."""
    self._jobs.put((transfer_id, host_slots, device_slots, post))

  def spread(self, part: Arrived, pools: io_backend.DevicePool) -> io_backend.DevicePool:
    """The pools, donated, with a part that arrived; its buffer is free once that is done."""
    slots = np.zeros(self._pages, np.int32)
    slots[: len(part.device_slots)] = part.device_slots
    there = jax.device_put((slots, np.int32(len(part.device_slots))), self._device)
    pools = self._spread(self._buffers[part.buffer], pools, *there)
    self.spread_over = programs.marker(pools[-1]).block_until_ready
    self._free.put((part.buffer, self.spread_over))
    return pools

  def warm(self, pools: io_backend.DevicePool) -> io_backend.DevicePool:
    """Compiles; the pools are donated and keep what they hold."""
    index, ready = self._take()
    ready()
    nothing = np.zeros(0, np.int32)
    part = Arrived(transfer_id=0, buffer=index, device_slots=nothing, is_last=True, at_s=0.0)
    return self.spread(part, pools)

  def _take(self) -> "_Free":
    free = self._free.get()
    assert free is not None  # that ends the thread, when there is no owner any more
    return free


_Free = tuple[int, Callable[[], object]]  # a buffer, and what returns when it may be written
_Job = tuple[int, np.ndarray, np.ndarray, Post]


class _Copier:
  """The copies of pages into a buffer. Keeps the buffers: one may be under way without an owner."""

  def __init__(self, *, host_at: int, buffers: tuple[jax.Array, ...], page_bytes: int) -> None:
    self._host_at, self._page_bytes, self._buffers = host_at, page_bytes, buffers
    self._buffers_at = [buffer.unsafe_buffer_pointer() for buffer in buffers]
    self._side = cuda_copies.SideStream()

  def copy(self, host_slots: np.ndarray, buffer: int) -> None:
    """Copies pages to the first rows of a buffer; returns when they are there."""
    rows = np.arange(len(host_slots))
    targets = cuda_copies.addresses(self._buffers_at[buffer], rows, self._page_bytes)
    sources = cuda_copies.addresses(self._host_at, host_slots, self._page_bytes)
    pages = max(1, SLICE_BYTES // self._page_bytes)
    for first in range(0, len(host_slots), pages):
      some = slice(first, first + pages)
      copies = cuda_copies.Copies(
        targets=targets[some], sources=sources[some], size_bytes=self._page_bytes
      )
      cuda_copies.submit_batch(copies, self._side.stream)
      self._side.synchronize()


def _end(over: threading.Event, free: "queue.SimpleQueue[_Free | None]") -> None:
  over.set()
  free.put(None)


def _work(
  jobs: "queue.SimpleQueue[_Job | None]",
  free: "queue.SimpleQueue[_Free | None]",
  over: threading.Event,
  copier: _Copier,
  pages: int,
) -> None:
  while (job := jobs.get()) is not None:
    transfer_id, host_slots, device_slots, post = job
    try:
      for first in range(0, max(len(host_slots), 1), pages):
        taken = free.get()
        if taken is None or over.is_set():  # the pools may be gone with the owner
          return
        buffer, ready = taken
        ready()
        copier.copy(host_slots[first : first + pages], buffer)
        part = Arrived(
          transfer_id=transfer_id, buffer=buffer, device_slots=device_slots[first : first + pages],
          is_last=first + pages >= len(host_slots), at_s=time.perf_counter(),
        )  # fmt: skip
        post(part)
        del part, ready, taken
    except BaseException as error:  # whoever waits for the load must hear of it
      post(error)
    del job, host_slots, device_slots, post  # nothing stays alive while there is nothing to do
