"""Compute with a load beside it, and how long both take."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.extend import core

from experiments import io_bench
from experiments.io_layers import Stack
from strata_jax.pallas_kernels import host_memory, timing
from strata_jax.pallas_kernels.fragment_io import api
from strata_jax.tiers import cuda_copies

_SHORT, _LONG = 0.4, 1.3  # length of the load, of that of the compute; its start may be late
_CALLS = 4  # programs between two waits
_BATCH_BYTES = 64 << 20  # of one cudaMemcpyBatchAsync
_SETTLE_S = 0.02
_CALLS_INLINED = {
  "jit": "jaxpr",
  "custom_jvp_call": "call_jaxpr",
  "custom_vjp_call": "call_jaxpr",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
  """What a load does to compute.

  Attributes:
    compute_s: the compute alone.
    slowdown: extra time of the compute over the time that the load runs.
    gbps: rate of a load that outlasts the compute.
    alone_gbps: rate of the load with nothing beside it.
  """

  compute_s: float
  slowdown: float
  gbps: float
  alone_gbps: float


def seconds_alone(stack: Stack) -> float:
  """Seconds of a stack with nothing beside it."""
  run = jax.jit(stack.run)
  return timing.seconds_a_call(lambda: run(stack.activations, stack.arrays))


class LoadBeside:
  """Loads the lists of some pools beside stacks."""

  def __init__(self, pools: io_bench.Pools, rounds: int) -> None:
    self._pools = pools
    self._rounds = rounds
    self._device = pools.device[0]
    # In the order of host memory: a region of a program with streams need not sort then.
    order = np.argsort(np.asarray(pools.host_slots))
    self._here = jnp.asarray(np.asarray(pools.host_slots)[order])
    self._there = jnp.asarray(np.asarray(pools.device_slots)[order])

  def kernel(self, stack: Stack, blocks: int) -> Effect:
    """Compute and load in one program, on two streams."""
    config = api.FragmentIoConfig(load_blocks=blocks, sort_from=2**31 - 1)

    def load(host, pool, here, there, count):
      return api.load_fragments(host, (pool,), here, there, count, config=config)[0]

    load_only = jax.jit(load, donate_argnums=1)
    both = jax.jit(
      on_two_streams(load, stack.run),
      donate_argnums=1,
      compiler_options={"xla_gpu_enable_command_buffer": ""},
    )

    def call_load(pages: int) -> Callable[[], object]:
      count = jnp.int32(pages)

      def call():
        self._device = load_only(self._pools.host, self._device, self._here, self._there, count)
        return self._device

      return call

    def call_both(pages: int) -> Callable[[], object]:
      count = jnp.int32(pages)

      def call():
        self._device, out = both(
          self._pools.host,
          self._device,
          self._here,
          self._there,
          count,
          stack.activations,
          stack.arrays,
        )
        return out

      return call

    page_bytes = self._pools.page_layout.page_bytes
    probe = self._pools.pages // 4
    rate = probe / _seconds(call_load(probe), self._rounds)  # pages a second
    compute_s = _seconds(call_both(0), 2)
    short = self._within(_SHORT * compute_s * rate)
    long = self._within(_LONG * compute_s * rate)
    alone, together, outlasted = _in_turns(
      self._rounds, call_both(0), call_both(short), call_both(long)
    )
    return Effect(
      compute_s=alone,
      slowdown=(together - alone) / (short / rate),
      gbps=long * page_bytes / outlasted / io_bench.GB,
      alone_gbps=rate * page_bytes / io_bench.GB,
    )

  def copy_engine(
    self, stack: Stack, sides: Sequence[cuda_copies.SideStream], page_bytes: int
  ) -> Effect:
    """Compute by JAX; whole pages by the driver, on other streams, for as long as that takes."""
    run = jax.jit(stack.run)
    compute = lambda: run(stack.activations, stack.arrays)
    pages = self._device.nbytes // page_bytes
    rng = np.random.default_rng(0)
    places = [
      cuda_copies.addresses(pool.unsafe_buffer_pointer(), rng.permutation(pages), page_bytes)
      for pool in (self._device, self._pools.host)
    ]
    batches = [
      cuda_copies.Copies(targets=targets, sources=sources, size_bytes=page_bytes)
      for targets, sources in zip(
        *(np.array_split(part, max(1, pages * page_bytes // _BATCH_BYTES)) for part in places),
        strict=True,
      )
    ]
    compute_s = _seconds(compute, 2)
    calls = max(_CALLS, int(0.1 / compute_s))
    _, alone_gbps = while_copying(lambda: time.sleep(0.2), batches, sides)
    alone, together, rates = [], [], []
    for _ in range(self._rounds):
      alone.append(_once(compute, calls))
      seconds, gbps = while_copying(lambda: _once(compute, calls), batches, sides)
      together.append(seconds)
      rates.append(gbps)
    base = float(np.median(alone))
    return Effect(
      compute_s=base,
      slowdown=float(np.median(together)) / base - 1,
      gbps=float(np.median(rates)),
      alone_gbps=alone_gbps,
    )

  def _within(self, pages: float) -> int:
    return max(1, min(self._pools.pages, int(pages)))


def while_copying[T](
  work: Callable[[], T],
  batches: Sequence[cuda_copies.Copies],
  sides: Sequence[cuda_copies.SideStream],
) -> tuple[T, float]:
  """Runs `work` while batches are copied over and over. Returns its result and GB/s copied.

  Two streams take turns, so that one batch runs while the next waits: more in CUDA's queue would
  hold up the launches of the work, too.
  """
  stop = threading.Event()
  copied = [0]

  def copy() -> None:
    for number in itertools.count():
      side, copies = sides[number % len(sides)], batches[number % len(batches)]
      side.synchronize()
      if stop.is_set():
        break
      cuda_copies.submit_batch(copies, side.stream)
      copied[0] += copies.targets.size * copies.size_bytes
    for side in sides:
      side.synchronize()

  copier = threading.Thread(target=copy)
  started_s = time.perf_counter()
  copier.start()
  try:
    time.sleep(_SETTLE_S)
    result = work()
  finally:
    stop.set()
    copier.join()
  return result, copied[0] / (time.perf_counter() - started_s) / io_bench.GB


def on_two_streams(load: Callable, run: Callable) -> Callable:
  """One program with two regions that become ready together and are awaited together."""

  def both(host, pool, here, there, count, x, arrays):
    source = host_memory.device_view(host)
    x, pool = lax.optimization_barrier((x, pool))
    pool, x = _region(load, 1)(source, pool, here, there, count), _region(run, 2)(x, arrays)
    x, pool = lax.optimization_barrier((x, pool))
    return pool, x

  return both


def _region(function: Callable, number: int) -> Callable:
  """`function` on stream `number`."""
  return compute_on(
    without_calls(function),
    compute_type=f"gpu_stream:{number}",
    out_memory_spaces=jax.memory.Space.Device,
  )


def without_calls(function: Callable) -> Callable:
  """`function` with all inner `jax.jit` inlined: XLA finds no stream for a call in a region."""

  def inlined(*args):
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    flat = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), flat)

  return inlined


def _evaluate(jaxpr, consts: Sequence, args: Sequence) -> list:
  values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
  read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]
  for equation in jaxpr.eqns:
    operands = [read(atom) for atom in equation.invars]
    if equation.primitive.name in _CALLS_INLINED:
      inner = equation.params[_CALLS_INLINED[equation.primitive.name]]
      results = _evaluate(inner.jaxpr, inner.consts, operands)
    else:
      params = equation.primitive.get_bind_params(equation.params)
      results = equation.primitive.bind(*operands, **params)
      results = results if equation.primitive.multiple_results else [results]
    values.update(zip(equation.outvars, results, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _once(call: Callable[[], object], calls: int) -> float:
  """Mean seconds of calls that follow each other."""
  started_s = time.perf_counter()
  for _ in range(calls - 1):
    call()
  jax.block_until_ready(call())
  return (time.perf_counter() - started_s) / calls


def _seconds(call: Callable[[], object], rounds: int) -> float:
  for _ in range(2):
    jax.block_until_ready(call())
  return float(np.median([_once(call, _CALLS) for _ in range(rounds)]))


def _in_turns(rounds: int, *calls: Callable[[], object]) -> tuple[float, ...]:
  """Median seconds of each; one round of each after the other, so that all see the same clocks."""
  for call in calls:
    jax.block_until_ready(call())
  times = [[_once(call, _CALLS) for call in calls] for _ in range(rounds)]
  return tuple(float(np.median(column)) for column in zip(*times, strict=True))
