"""Fragment moves by the mover kernel; see `api` for the arguments."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from strata_jax.pallas_kernels import host_memory, mover


def load(
  host: jax.Array,
  device: tuple[jax.Array, ...],
  host_slots: jax.Array,
  device_slots: jax.Array,
  count: jax.Array | int,
  *,
  layer: jax.Array | int | None,
  blocks: int,
  loads_in_flight: int,
  sort: bool,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, ...]:
  """Page-first to layer-first, all layers or the one called `layer`."""
  move = _mover(
    host,
    device,
    host_slots,
    blocks=blocks,
    loads_in_flight=loads_in_flight,
    to_layers=True,
    interpret=interpret,
  )
  if sort:
    host_slots, device_slots = by_host_slot(host_slots, device_slots, count)
  source = host_memory.device_view(host)
  layer = jnp.reshape(jnp.int32(0 if layer is None else layer), 1)

  def update(pools):
    move(jnp.reshape(jnp.int32(count), 1), layer, host_slots, device_slots, source, *pools)

  return pl.run_state(update)(tuple(device))


def store(
  device: tuple[jax.Array, ...],
  host: jax.Array,
  device_slots: jax.Array,
  host_slots: jax.Array,
  count: jax.Array | int,
  *,
  layer: jax.Array | int | None,
  blocks: int,
  loads_in_flight: int,
  sort: bool,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
  """Layer-first to page-first, all layers or the one called `layer`."""
  move = _mover(
    host,
    device,
    host_slots,
    blocks=blocks,
    loads_in_flight=loads_in_flight,
    to_layers=False,
    interpret=interpret,
  )
  if sort:
    host_slots, device_slots = by_host_slot(host_slots, device_slots, count)
  layer = jnp.reshape(jnp.int32(0 if layer is None else layer), 1)

  def update(pool):
    move(jnp.reshape(jnp.int32(count), 1), layer, host_slots, device_slots, pool, *device)

  return pl.run_state(update)(host_memory.device_view(host))


def _mover(host, device, slots, *, blocks, loads_in_flight, to_layers, interpret):
  fragment = device[0]
  work = mover.Work(
    fragment_bytes=math.prod(fragment.shape[1:]) * fragment.dtype.itemsize,
    pool_layers=host.shape[1],
    moved_layers=len(device),
    bucket=slots.shape[0],
    to_layers=to_layers,
    blocks=blocks,
    loads_in_flight=loads_in_flight,
  )
  return mover.make_mover(work, interpret)


def by_host_slot(
  host_slots: jax.Array, device_slots: jax.Array, count: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
  """The valid entries in the order of host memory, then the rest.

  Address translation is what limits one SM: neighbours in host memory share its page tables.
  """
  valid = jnp.arange(host_slots.shape[0]) < count
  # No jnp.where: as an inner jit it cannot be in a region with a stream of its own.
  keys = lax.select(valid, host_slots, jnp.full_like(host_slots, 2**31 - 1))
  host_slots, device_slots = lax.sort((keys, device_slots), num_keys=1, is_stable=False)
  return host_slots, device_slots
