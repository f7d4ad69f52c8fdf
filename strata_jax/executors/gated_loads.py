"""Loads by the CUDA driver beside the compute: each layer is gated on its own copies.

The copies run on a stream of their own. A thread submits them, all layers in a row, since the
driver takes longer over a loop of copies than the device over a layer. It stays a few layers ahead
of the link: the driver lets nobody launch while it waits for room for more copies. Before the
compute of layer l a small program is launched, which XLA hands its stream to while it is being
enqueued: there the stream is made to wait for the copies of layer l, once they have been submitted.
"""

import queue
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import buffer_callback

from strata_jax.executors import fragment_copies, workers
from strata_jax.tiers import cuda_copies

_TIMING = 0  # cudaEventDefault
_NO_TIMING = 2  # cudaEventDisableTiming
_NOT_READY = 600  # cudaErrorNotReady
_LAYERS_AHEAD = 4  # whose copies are submitted and not done
BACKENDS = fragment_copies.BACKENDS


class Gate(NamedTuple):
  """Of one load.

  Attributes:
    hold: is handed a layer and its pool, donated, and returns the pool: whatever is launched from
      then on runs behind the loads up to this layer. To be called in the order of the layers, for
      the first and the last of them at least.
    is_loaded: whether the copies up to a layer are done: then its gate holds nothing up.
  """

  hold: Callable[[int, jax.Array], jax.Array]
  is_loaded: Callable[[int], bool]


class GatedLoads:
  """Begins loads, one at a time, each with a gate."""

  def __init__(self, copies: fragment_copies.FragmentCopies) -> None:
    """Makes a stream and an event a layer for copies between pools that never move."""
    self._copies = copies
    self._side = cuda_copies.SideStream()
    self._runtime = cuda_copies.cuda_module("cuda.bindings.runtime")
    events = lambda flags: [
      self._call("cudaEventCreateWithFlags", flags)[0] for _ in range(copies.layers)
    ]
    self._events = events(_NO_TIMING)
    self._reached, self._passed = events(_TIMING), events(_TIMING)
    self._held: list[int] = []  # layers of the last load that had a gate
    self._actions: queue.SimpleQueue[Callable[[int], None]] = queue.SimpleQueue()
    self._program = jax.jit(self._gated, donate_argnums=0)
    jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    self._jobs = jobs
    workers.start(self, _work, jobs)

  def begin(self, host_slots: np.ndarray, device_slots: np.ndarray) -> Gate:
    """The gate of one load, int32 [pages] both; its first layer's starts the copies."""
    submitted: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()  # a layer each
    self._held = held = []
    known = 0  # layers that were taken from `submitted`

    def submit() -> None:
      try:
        layers = self._copies.by_layer(host_slots, device_slots, to_device=True)
        for layer, copies in enumerate(layers):
          if layer >= _LAYERS_AHEAD:
            self._call("cudaEventSynchronize", self._events[layer - _LAYERS_AHEAD])
          self._copies.submit(copies, self._side.stream)
          self._call("cudaEventRecord", self._events[layer], self._side.stream)
          submitted.put(None)
      except BaseException as error:  # whoever waits for a layer must hear of it
        submitted.put(error)

    def act(layer: int, stream: int) -> None:
      nonlocal known
      try:
        self._call("cudaEventRecord", self._reached[layer], stream)
        if layer == 0:  # the pages that are written may still be read, those read just be written
          self._side.wait_for(stream)
          self._jobs.put(submit)
        while known <= layer:
          if (error := submitted.get()) is not None:
            raise error
          known += 1
        self._call("cudaStreamWaitEvent", stream, self._events[layer], 0)
        self._call("cudaEventRecord", self._passed[layer], stream)
      except BaseException as error:
        submitted.put(error)  # for the gates that follow, which may wait for what nobody submits
        raise

    def hold(layer: int, pool: jax.Array) -> jax.Array:
      held.append(layer)
      self._actions.put(lambda stream: act(layer, stream))
      return self._program(pool)

    def is_loaded(layer: int) -> bool:
      return known + submitted.qsize() > layer and self._is_over(self._events[layer])

    return Gate(hold, is_loaded)

  def stalled_s(self) -> float:
    """How long the compute stood at the gates of the last load, once it has passed them all."""
    stood = (
      self._call("cudaEventElapsedTime", self._reached[layer], self._passed[layer])[0]
      for layer in self._held
    )
    return sum(stood) / 1e3

  def warm(self, pool: jax.Array) -> jax.Array:
    """Compiles the gate; the pool is donated."""
    self._actions.put(lambda stream: None)
    return self._program(pool)

  def _gated(self, pool: jax.Array) -> jax.Array:
    def callback(context, out, buffer):
      del out, buffer
      self._actions.get_nowait()(cuda_copies.stream_of(context))

    # No side effect is named, though there is one: such programs are called in a slower way (39 us
    # instead of 7, on a CPU). The call stays, for the pool that it returns goes to the compute.
    return buffer_callback.buffer_callback(
      callback, jax.ShapeDtypeStruct(pool.shape, pool.dtype), input_output_aliases={0: 0}
    )(pool)

  def _is_over(self, event: Any) -> bool:
    (code,) = self._runtime.cudaEventQuery(event)
    if int(code) not in (0, _NOT_READY):
      raise RuntimeError(f"cudaEventQuery: CUDA error {int(code)}")
    return not int(code)

  def _call(self, name: str, *args: Any) -> list[Any]:
    code, *results = getattr(self._runtime, name)(*args)
    if int(code):
      raise RuntimeError(f"{name}: CUDA error {int(code)}")
    return results


def _work(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
  while (job := jobs.get()) is not None:
    job()
    del job  # nothing stays alive while there is nothing to do
