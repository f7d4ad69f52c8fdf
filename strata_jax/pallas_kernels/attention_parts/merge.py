"""Partial results over parts of a context, made one."""

import jax
import jax.numpy as jnp
from jax import lax

from strata_jax.pallas_kernels.attention_parts import tiles, work_line

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


def merge_items(
  out: jax.Array,
  lse: jax.Array,
  line: work_line.WorkLine,
  groups: work_line.Groups,
  *,
  heads: int,
  dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, jax.Array]:
  """Attention over all that a row attends to, alone and with its group.

  Args:
    out: float32 [items, parts, rows, D], normalised over a part.
    lse: float32 [items, parts, rows].
    line: the items.
    groups: of the B rows.
    heads: of a row.
    dtype: of the result.

  Returns:
    [B, heads, D] and float32 [B, heads]: 0 and `NOTHING` for rows without tokens.
  """
  batch, padded = len(groups.leaders), tiles.padded_heads(heads)
  alone = merge_parts(out[:batch, :, :heads], lse[:batch, :, :heads], line.parts[:batch])
  if len(out) == batch:
    return alone[0].astype(dtype), alone[1]
  shared, shared_lse = merge_parts(out[batch:], lse[batch:], line.parts[batch:])
  member = groups.sides[:, None] * padded + lax.iota(jnp.int32, heads)  # [B, heads]
  leaders = groups.leaders[:, None]
  both = jnp.stack([alone[0], shared[leaders, member]], 1)
  both_lse = jnp.stack([alone[1], shared_lse[leaders, member]], 1)
  merged, merged_lse = merge_parts(both, both_lse, jnp.full((batch,), 2, jnp.int32))
  nothing = merged_lse < NOTHING / 2
  return merged.astype(dtype), lax.select(nothing, jnp.full_like(merged_lse, NOTHING), merged_lse)
