"""Pools and page tables for tests of attention kernels."""

import jax
import jax.numpy as jnp
import numpy as np


def pages_of(args, tokens: np.ndarray, rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
  """Random KV of rows with so many tokens, in pages at random places.

  What no valid token has written is NaN, table entries beyond the pages of a row are garbage.

  Args:
    args: with `page_size`, `kv_heads`, `head_dim` and `pool_shape(pages)`.
    tokens: int32 [B].
    rng: draws it all.

  Returns:
    The pool, bfloat16 of `pool_shape`, and the tables, int32 [B, N].
  """
  used = -(-tokens // args.page_size)
  total = int(used.sum()) + 3
  order = rng.permutation(total).astype(np.int32)
  table = rng.integers(-(2**31), 2**31, (len(tokens), max(used) + 2)).astype(np.int32)
  pool = np.full(args.pool_shape(total), np.nan, np.float32)
  for row, count in enumerate(tokens):
    own, order = order[: used[row]], order[used[row] :]
    table[row, : used[row]] = own
    shape = (2, used[row] * args.page_size, args.kv_heads, args.head_dim)
    kv = rng.standard_normal(shape, np.float32)
    kv[:, count:] = np.nan
    pool[own] = kv.reshape(2, used[row], *args.pool_shape(0)[2:]).swapaxes(0, 1)
  return jnp.asarray(pool, jnp.bfloat16), jnp.asarray(table)
