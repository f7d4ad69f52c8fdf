"""What the fragment moves mean, in plain jnp.

All functions are pure and traceable. Indices from `count` on are replaced before anything is read
or written: reads of them fall on page 0 and their writes are dropped. A slot outside its pool
among the first `count` is a bug of the caller; here its write is dropped.
"""

import jax
import jax.numpy as jnp

_DEVICE = jax.memory.Space.Device
_HOST = jax.memory.Space.Host


def load_layer(
  host: jax.Array,
  device_layer: jax.Array,
  layer: jax.Array | int,
  host_slots: jax.Array,
  device_slots: jax.Array,
  count: jax.Array | int,
) -> jax.Array:
  """Page-first host pool to the pool of one layer.

  Args:
    host: `[host_pages, layers, *fragment]`, in any memory space.
    device_layer: `[device_pages, *fragment]`.
    layer: which layer of `host` to read.
    host_slots: int32 `[bucket]`, may repeat.
    device_slots: int32 `[bucket]`, distinct among the first `count`.
    count: how many entries are valid.

  Returns:
    `device_layer` with `[device_slots[i]] = host[host_slots[i], layer]` for i < count.
  """
  valid = jnp.arange(host_slots.shape[0]) < count
  fragments = jax.device_put(host, _DEVICE)[jnp.where(valid, host_slots, 0), layer]
  targets = jnp.where(valid, device_slots, device_layer.shape[0])
  return device_layer.at[targets].set(fragments, mode="drop")


def load(
  host: jax.Array,
  device: tuple[jax.Array, ...],
  host_slots: jax.Array,
  device_slots: jax.Array,
  count: jax.Array | int,
) -> tuple[jax.Array, ...]:
  """`load_layer` for every layer."""
  return tuple(
    load_layer(host, pool, layer, host_slots, device_slots, count)
    for layer, pool in enumerate(device)
  )


def store(
  device: tuple[jax.Array, ...],
  host: jax.Array,
  device_slots: jax.Array,
  host_slots: jax.Array,
  count: jax.Array | int,
) -> jax.Array:
  """Layer-first device pools to the page-first host pool.

  Args:
    device: a layer each, `[device_pages, *fragment]`.
    host: `[host_pages, layers, *fragment]`, in pinned host memory.
    device_slots: int32 `[bucket]`, may repeat.
    host_slots: int32 `[bucket]`, distinct among the first `count`.
    count: how many entries are valid.

  Returns:
    `host`, still in host memory, with `[host_slots[i], l] = device[l][device_slots[i]]` for
    i < count.
  """
  valid = jnp.arange(host_slots.shape[0]) < count
  sources = jnp.where(valid, device_slots, 0)
  pages = jnp.stack([pool[sources] for pool in device], axis=1)  # [bucket, layers, *fragment]
  targets = jnp.where(valid, host_slots, host.shape[0])
  written = jax.device_put(host, _DEVICE).at[targets].set(pages, mode="drop")
  return jax.device_put(written, _HOST)


def store_layer(
  device_layer: jax.Array,
  host: jax.Array,
  layer: jax.Array | int,
  device_slots: jax.Array,
  host_slots: jax.Array,
  count: jax.Array | int,
) -> jax.Array:
  """`store` of one layer: `[host_slots[i], layer] = device_layer[device_slots[i]]`."""
  valid = jnp.arange(host_slots.shape[0]) < count
  fragments = device_layer[jnp.where(valid, device_slots, 0)]
  targets = jnp.where(valid, host_slots, host.shape[0])
  written = jax.device_put(host, _DEVICE).at[targets, layer].set(fragments, mode="drop")
  return jax.device_put(written, _HOST)
