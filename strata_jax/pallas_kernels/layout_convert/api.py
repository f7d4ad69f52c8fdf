"""The public calls of layout conversion; pure and traceable, in place under donation."""

from typing import Literal

import jax

from strata_jax.pallas_kernels.layout_convert import mosaic_gpu, reference

Implementation = Literal["mosaic_gpu", "reference"]
DEFAULT_BLOCKS = 132  # one an SM of an H100 or H200; fewer leave SMs to others


def pages_to_layers(
  staging: jax.Array,
  device: tuple[jax.Array, ...],
  device_slots: jax.Array,
  count: jax.Array | int,
  *,
  implementation: Implementation = "mosaic_gpu",
  blocks: int = DEFAULT_BLOCKS,
) -> tuple[jax.Array, ...]:
  """Spreads page-first pages over the layers' pools.

  Args:
    staging: `[bucket, layers, *fragment]` in device memory.
    device: a layer each, `[device_pages, *fragment]`.
    device_slots: int32 `[bucket]`, distinct among the first `count`.
    count: valid rows of `staging`; rows and slots beyond are never read.
    implementation: the kernel, or plain jnp.
    blocks: thread blocks of the kernel.

  Returns:
    The pools, with `device[l][device_slots[i]] = staging[i, l]` for i < count.

  Raises:
    ValueError: shapes or dtypes do not fit, or a fragment is no multiple of 16 bytes.
  """
  _check(staging, device, device_slots)
  if implementation == "reference":
    return reference.pages_to_layers(staging, device, device_slots, count)
  return mosaic_gpu.pages_to_layers(staging, device, device_slots, count, blocks=blocks)


def layers_to_pages(
  device: tuple[jax.Array, ...],
  staging: jax.Array,
  device_slots: jax.Array,
  count: jax.Array | int,
  *,
  implementation: Implementation = "mosaic_gpu",
  blocks: int = DEFAULT_BLOCKS,
) -> jax.Array:
  """Gathers pages from the layers' pools; arguments and errors as in `pages_to_layers`.

  Returns:
    `staging`, with `[i, l] = device[l][device_slots[i]]` for i < count; device slots may repeat.
  """
  _check(staging, device, device_slots)
  if implementation == "reference":
    return reference.layers_to_pages(device, staging, device_slots, count)
  return mosaic_gpu.layers_to_pages(device, staging, device_slots, count, blocks=blocks)


def _check(staging: jax.Array, device: tuple[jax.Array, ...], device_slots: jax.Array) -> None:
  if len(device) != staging.shape[1]:
    raise ValueError(f"device pools: expected {staging.shape[1]}, got {len(device)}")
  for pool in device:
    if pool.shape[1:] != staging.shape[2:] or pool.dtype != staging.dtype:
      raise ValueError(
        f"device pool: expected fragments {staging.dtype} {staging.shape[2:]} as the staging "
        f"buffer has, got {pool.dtype} {pool.shape[1:]}"
      )
  if device_slots.shape != staging.shape[:1]:
    raise ValueError(
      f"device_slots: expected one a staging row {staging.shape[:1]}, got {device_slots.shape}"
    )
