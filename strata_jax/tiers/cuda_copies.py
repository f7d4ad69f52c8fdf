"""Copies by the CUDA driver, submitted from inside a JAX program, in the order of its stream."""

import ctypes
import dataclasses
import functools
import importlib
import itertools
import queue
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import buffer_callback

from strata_jax.pallas_kernels import host_memory

_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_PREFER_OVERLAP = 1  # cudaMemcpyFlagPreferOverlapWithCompute
_KIND_DEFAULT = 4  # cudaMemcpyDefault: the addresses tell the direction
_NON_BLOCKING = 1  # cudaStreamNonBlocking
_NO_TIMING = 2  # cudaEventDisableTiming


class _Location(ctypes.Structure):
  _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
  _fields_ = (
    ("order", ctypes.c_int),
    ("source_hint", _Location),
    ("target_hint", _Location),
    ("flags", ctypes.c_uint),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copies:
  """Byte ranges to copy: three arrays of one length.

  Attributes:
    targets: uint64 addresses.
    sources: uint64 addresses.
    size_bytes: of every copy.
  """

  targets: np.ndarray
  sources: np.ndarray
  size_bytes: int


Submit = Callable[[Copies, int], None]


@functools.cache
def _cudart() -> ctypes.CDLL:
  """libcudart by ctypes: cuda.bindings builds Python lists for every batch, slower than copying."""
  return ctypes.CDLL(cuda_module("cuda.pathfinder").load_nvidia_dynamic_lib("cudart").abs_path)


def cuda_module(module: str) -> Any:
  """Imports a module of cuda.bindings. Raises ImportError with what to install."""
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(f"{module}: pip install 'strata-jax[cuda]'") from error


def submit_batch(copies: Copies, stream: int) -> None:
  """All copies in one cudaMemcpyBatchAsync. Raises RuntimeError if CUDA refuses."""
  count = copies.targets.size
  if count == 0:  # an empty batch is an error to CUDA
    return
  sizes = np.full(count, copies.size_bytes, np.uint64)
  attributes = _Attributes(_STREAM_ORDER, _Location(), _Location(), _PREFER_OVERLAP)
  first = ctypes.c_size_t(0)
  _check(
    _cudart().cudaMemcpyBatchAsync(
      _pointer(copies.targets),
      _pointer(copies.sources),
      _pointer(sizes),
      ctypes.c_size_t(count),
      ctypes.byref(attributes),
      ctypes.byref(first),
      ctypes.c_size_t(1),
      ctypes.c_void_p(stream),
    ),
    "cudaMemcpyBatchAsync",
  )


def memcpy_async() -> Any:
  """The driver's `cudaMemcpyAsync(target, source, bytes, kind, stream)`, which returns a code."""
  call = _cudart().cudaMemcpyAsync
  call.argtypes = (
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
  )
  return call


def submit_each(copies: Copies, stream: int) -> None:
  """One cudaMemcpyAsync a copy. Raises RuntimeError if CUDA refuses one."""
  call = memcpy_async()
  # `map` calls through ctypes without running Python code in between.
  codes = map(
    call,
    copies.targets.tolist(),
    copies.sources.tolist(),
    itertools.repeat(copies.size_bytes),
    itertools.repeat(_KIND_DEFAULT),
    itertools.repeat(stream),
  )
  for code in set(codes):
    _check(code, "cudaMemcpyAsync")


class SideStream:
  """A stream of copies beside JAX's, tied to it by events."""

  def __init__(self) -> None:
    self._runtime = cuda_module("cuda.bindings.runtime")
    (stream,) = self._call("cudaStreamCreateWithFlags", _NON_BLOCKING)
    self.stream = int(stream)
    (self._fork,) = self._call("cudaEventCreateWithFlags", _NO_TIMING)
    (self._join,) = self._call("cudaEventCreateWithFlags", _NO_TIMING)

  def wait_for(self, stream: int) -> None:
    """What is submitted here from now on runs after what `stream` has so far."""
    self._call("cudaEventRecord", self._fork, stream)
    self._call("cudaStreamWaitEvent", self.stream, self._fork, 0)

  def gate(self, stream: int) -> None:
    """What `stream` gets from now on runs after what was submitted here so far."""
    self._call("cudaEventRecord", self._join, self.stream)
    self._call("cudaStreamWaitEvent", stream, self._join, 0)

  def synchronize(self) -> None:
    self._call("cudaStreamSynchronize", self.stream)

  def _call(self, name: str, *args) -> list[Any]:
    code, *results = getattr(self._runtime, name)(*args)
    _check(int(code), name)
    return results


Plan = Callable[[Sequence[int], Sequence[int]], Copies]


class CopyCalls:
  """Lets programs contain copies whose slots are handed over when they are called.

  JAX runs the programs of a device in the order in which they were called, so a queue brings each
  its plan: a function from the addresses of the arrays that are written and of those that are read
  to the copies.
  """

  def __init__(self, submit: Submit, side: SideStream | None = None) -> None:
    self._submit = submit
    self._side = side
    self._plans: queue.SimpleQueue[Plan] = queue.SimpleQueue()

  def hand_over(self, plan: Plan) -> None:
    """Queues the plan of the next program to be called."""
    self._plans.put(plan)

  def insert(
    self, written: Sequence[jax.Array], read: Sequence[jax.Array]
  ) -> tuple[jax.Array, ...]:
    """Under `jax.jit`: the copies, from `read` to `written`, which is changed in place.

    Returns:
      `written`; the enclosing program must donate it.
    """

    def copy(context, out, *buffers):
      copies = self._plans.get_nowait()(
        [_buffer_address(buffer) for buffer in out],
        [_buffer_address(buffer) for buffer in buffers[len(out) :]],
      )
      stream = stream_of(context)
      if self._side is None:
        self._submit(copies, stream)
        return
      self._side.wait_for(stream)
      self._submit(copies, self._side.stream)
      self._side.gate(stream)

    views = [host_memory.device_view(array) for array in (*written, *read)]
    return buffer_callback.buffer_callback(
      copy,
      tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in written),
      input_output_aliases={index: index for index in range(len(written))},
      has_side_effect=True,
    )(*views)


def stream_of(context: buffer_callback.ExecutionContext) -> int:
  """The CUDA stream that the program around a callback is being enqueued on."""
  return context.stream


def addresses(base: int, index: np.ndarray, size_bytes: int) -> np.ndarray:
  """uint64 addresses of the parts `index` of memory cut into parts of `size_bytes`."""
  return np.uint64(base) + index.astype(np.uint64) * np.uint64(size_bytes)


def read_lists(
  host_slots: jax.Array, device_slots: jax.Array, count: jax.Array | int
) -> tuple[np.ndarray, np.ndarray]:
  """The valid entries of both lists on the host, int64; waits for them."""
  host, device, valid = jax.device_get((host_slots, device_slots, count))
  return host[: int(valid)].astype(np.int64), device[: int(valid)].astype(np.int64)


def _buffer_address(buffer: buffer_callback.Buffer) -> int:
  """Where a buffer lies; DLPack is the only protocol of it that knows all dtypes."""
  capsule = buffer.__dlpack__()
  tensor = ctypes.pythonapi.PyCapsule_GetPointer
  tensor.argtypes, tensor.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
  # struct DLTensor: void* data, ..., uint64_t byte_offset at 40.
  place = tensor(capsule, b"dltensor")
  return sum(ctypes.c_uint64.from_address(place + field).value for field in (0, 40))


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
  return array.ctypes.data_as(ctypes.c_void_p)


def _check(code: int, call: str) -> None:
  if code:
    raise RuntimeError(f"{call}: CUDA error {code}")
