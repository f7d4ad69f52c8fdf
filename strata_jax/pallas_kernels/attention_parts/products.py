"""Pieces of a kernel of attention: products of a warpgroup and the state of its softmax."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from strata_jax.pallas_kernels.attention_parts import tiles

# How operands of products lie in shared memory.
TRANSFORMS = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def multiply(left, right) -> jax.Array:
  """float32 of a [64, K] in shared memory or registers and a [K, N] in shared memory."""

  def into(acc):
    plgpu.wgmma(acc, left, right)
    return acc[...]

  shape = left.shape[0], right.shape[1]
  return pl.run_scoped(into, plgpu.ACC(shape, jnp.float32))


def nothing_yet(head_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Of 64 queries that have seen no key: weighted values, highest score, sum of the weights."""
  shapes = (tiles.QUERY_ROWS, head_dim), (tiles.QUERY_ROWS,), (tiles.QUERY_ROWS,)
  layouts = plgpu.Layout.WGMMA, *(plgpu.Layout.WGMMA.reduce(1),) * 2
  acc, high, total = (
    plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
    for shape, value, layout in zip(shapes, (0, -jnp.inf, 0), layouts, strict=True)
  )
  return acc, high, total


def clear_tail(values, valid_rows: jax.Array) -> None:
  """Zeroes rows that no token has written: a weight of 0 does not undo a NaN."""
  loaded = plgpu.load(values, layout=plgpu.Layout.WGMMA)
  index = plgpu.broadcasted_iota(jnp.int32, loaded.shape, 0, layout=plgpu.Layout.WGMMA)
  values[...] = jnp.where(index < valid_rows, loaded, jnp.zeros_like(loaded))
  plgpu.commit_smem()
