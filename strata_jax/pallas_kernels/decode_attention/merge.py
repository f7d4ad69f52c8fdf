"""Partial results over parts of a context, made one."""

import jax
import jax.numpy as jnp
from jax import lax

NOTHING = -1e30  # the log-sum-exp of no key at all: finite, so that differences are no NaN


def merge_parts(out: jax.Array, lse: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Attention over all parts of a row.

  With total = sum over parts of exp(lse): out = sum of exp(lse) / total times a part's out.

  Args:
    out: float32 [B, parts, heads, D], normalised over a part.
    lse: float32 [B, parts, heads], log of the sum of exp(scores) over a part.
    counts: int32 [B], how many parts a row has; others may hold anything.

  Returns:
    float32 [B, heads, D] and [B, heads]: 0 and `NOTHING` for rows without parts.
  """
  # No jnp.where: as an inner jit it cannot be in a region with a stream of its own.
  used = lax.broadcasted_iota(jnp.int32, lse.shape, 1) < counts[:, None, None]
  lse = lax.select(used, lse, jnp.full_like(lse, NOTHING))
  high = jnp.max(lse, axis=1, keepdims=True)
  weights = lax.select(used, lax.exp(lse - high), jnp.zeros_like(lse))
  total = jnp.sum(weights, axis=1, keepdims=True)
  some = total > 0
  total = lax.max(total, jnp.float32(1e-30))
  used = lax.broadcast_in_dim(used, out.shape, (0, 1, 2))
  out = lax.select(used, out * (weights / total)[..., None], jnp.zeros_like(out))
  lse = lax.select(some, high + lax.log(total), jnp.full_like(high, NOTHING))
  return jnp.sum(out, axis=1), jnp.squeeze(lse, 1)
