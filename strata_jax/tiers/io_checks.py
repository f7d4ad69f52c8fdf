"""Argument checks that all I/O back ends share; they read shapes and dtypes, never values."""

import jax
import jax.numpy as jnp

from strata_jax.tiers import io_backend, layout


def check_pools(
  page_layout: layout.PageLayout, host: io_backend.HostPool, device: io_backend.DevicePool
) -> None:
  """Raises ValueError unless both pools have the layout's shapes and dtype."""
  if len(device) != page_layout.num_layers:
    raise ValueError(
      f"device pool: expected {page_layout.num_layers} layers, got {len(device)} arrays"
    )
  _check("host pool", host, page_layout.host_shape(host.shape[0]), page_layout.dtype)
  for index, pool in enumerate(device):
    _check(
      f"device pool, layer {index}",
      pool,
      page_layout.device_shape(pool.shape[0]),
      page_layout.dtype,
    )
    if pool.shape[0] != device[0].shape[0]:
      raise ValueError(
        f"device pool, layer {index}: expected {device[0].shape[0]} pages as layer 0 has, "
        f"got {pool.shape[0]}"
      )


def check_layer(
  page_layout: layout.PageLayout,
  host: io_backend.HostPool,
  device_layer: jax.Array,
  layer: jax.Array | int,
) -> None:
  """Raises ValueError unless the arguments of `load_layer` fit the layout."""
  _check("host pool", host, page_layout.host_shape(host.shape[0]), page_layout.dtype)
  _check(
    "device pool of one layer",
    device_layer,
    page_layout.device_shape(device_layer.shape[0]),
    page_layout.dtype,
  )
  if isinstance(layer, int) and not 0 <= layer < page_layout.num_layers:
    raise ValueError(f"layer: expected 0 <= layer < {page_layout.num_layers}, got {layer}")


def check_slots(host_slots: io_backend.Slots, device_slots: io_backend.Slots) -> None:
  """Raises ValueError unless both are int32 vectors of one length."""
  for name, slots in (("host_slots", host_slots), ("device_slots", device_slots)):
    if slots.ndim != 1 or slots.dtype != jnp.int32:
      raise ValueError(f"{name}: expected int32 [bucket], got {slots.dtype} {slots.shape}")
  if host_slots.shape != device_slots.shape:
    raise ValueError(
      f"slots: expected two lists of one length, got {host_slots.shape[0]} host slots and "
      f"{device_slots.shape[0]} device slots"
    )


def sharding_of(pool: jax.Array) -> jax.sharding.Sharding | None:
  """Where a pool lives; None while a program that contains the call is being traced."""
  return None if isinstance(pool, jax.core.Tracer) else pool.sharding


def _check(name: str, pool: jax.Array, shape: tuple[int, ...], dtype: str) -> None:
  if pool.shape != shape or pool.dtype != jnp.dtype(dtype):
    raise ValueError(f"{name}: expected {dtype} {shape}, got {pool.dtype} {pool.shape}")
