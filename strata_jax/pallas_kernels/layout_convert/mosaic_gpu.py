"""Layout conversion by the mover kernel, on all SMs; see `api` for the arguments."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from strata_jax.pallas_kernels.fragment_io import mosaic_gpu

_LOADS_IN_FLIGHT = 8  # device memory wants all that the registers hold


def pages_to_layers(
  staging: jax.Array,
  device: tuple[jax.Array, ...],
  device_slots: jax.Array,
  count: jax.Array | int,
  *,
  blocks: int,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, ...]:
  """Staging row i to page `device_slots[i]` of every layer."""
  rows = jnp.arange(staging.shape[0], dtype=jnp.int32)
  return mosaic_gpu.load(
    staging,
    device,
    rows,
    device_slots,
    count,
    layer=None,
    blocks=blocks,
    loads_in_flight=_LOADS_IN_FLIGHT,
    sort=False,
    interpret=interpret,
  )


def layers_to_pages(
  device: tuple[jax.Array, ...],
  staging: jax.Array,
  device_slots: jax.Array,
  count: jax.Array | int,
  *,
  blocks: int,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
  """Page `device_slots[i]` of every layer to staging row i."""
  rows = jnp.arange(staging.shape[0], dtype=jnp.int32)
  return mosaic_gpu.store(
    device,
    staging,
    device_slots,
    rows,
    count,
    layer=None,
    blocks=blocks,
    loads_in_flight=_LOADS_IN_FLIGHT,
    sort=False,
    interpret=interpret,
  )
