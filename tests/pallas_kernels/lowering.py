"""Lowers programs for an H200 on a machine without one."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from strata_jax.pallas_kernels import lowered_once
from strata_jax.tiers import layout

_H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
_MESH = AbstractMesh((1,), ("x",), abstract_device=_H200)
DEVICE = NamedSharding(_MESH, PartitionSpec())
HOST = NamedSharding(_MESH, PartitionSpec(), memory_kind="pinned_host")


def slots(bucket: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((bucket,), jnp.int32, sharding=DEVICE)


def scalar() -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((), jnp.int32, sharding=DEVICE)


def page_first(page_layout: layout.PageLayout, pages: int, sharding) -> jax.ShapeDtypeStruct:
  shape, dtype = page_layout.host_shape(pages), jnp.dtype(page_layout.dtype)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def layer_first(page_layout: layout.PageLayout, pages: int) -> tuple[jax.ShapeDtypeStruct, ...]:
  shape, dtype = page_layout.device_shape(pages), jnp.dtype(page_layout.dtype)
  pool = jax.ShapeDtypeStruct(shape, dtype, sharding=DEVICE)
  return (pool,) * page_layout.num_layers


def lower(function, *args) -> str:
  """StableHLO of a jitted function for CUDA."""
  return function.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def count_lowered_once(monkeypatch) -> list[int]:
  """Empties what is lowered once; from now on the list grows with every lowering."""
  lowered, lower = [], lowered_once.export.export
  monkeypatch.setattr(
    lowered_once.export, "export", lambda *args, **how: lowered.append(0) or lower(*args, **how)
  )
  lowered_once._exported.cache_clear()
  return lowered
