"""What layout conversion means, in plain jnp."""

import jax
import jax.numpy as jnp

from strata_jax.pallas_kernels.fragment_io import reference


def pages_to_layers(
  staging: jax.Array,
  device: tuple[jax.Array, ...],
  device_slots: jax.Array,
  count: jax.Array | int,
) -> tuple[jax.Array, ...]:
  """`device[l][device_slots[i]] = staging[i, l]` for i < count."""
  rows = jnp.arange(staging.shape[0], dtype=jnp.int32)
  return reference.load(staging, device, rows, device_slots, count)


def layers_to_pages(
  device: tuple[jax.Array, ...],
  staging: jax.Array,
  device_slots: jax.Array,
  count: jax.Array | int,
) -> jax.Array:
  """`staging[i, l] = device[l][device_slots[i]]` for i < count."""
  valid = jnp.arange(staging.shape[0]) < count
  pages = jnp.stack([pool[jnp.where(valid, device_slots, 0)] for pool in device], axis=1)
  return jnp.where(valid.reshape(-1, *(1,) * (staging.ndim - 1)), pages, staging)
