"""What decode attention means, in plain jnp."""

import jax
import jax.numpy as jnp

from strata_jax.pallas_kernels.attention_parts import merge


def attend(
  q: jax.Array, pool: jax.Array, page_table: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Softmax over the first `tokens[b]` tokens of a row's pages, in float32.

  Args:
    q: [B, heads, D].
    pool: [pages, 2, page_size, kv_heads, D].
    page_table: int32 [B, N]; what lies beyond the pages of the valid tokens may be anything.
    tokens: int32 [B].

  Returns:
    float32 [B, heads, D], 0 for a row without tokens; the log-sum-exp of the scores, float32
    [B, heads], `merge.NOTHING` for such a row.
  """
  (batch, heads, head_dim), (_, _, page_size, kv_heads, _) = q.shape, pool.shape
  valid = jnp.arange(page_table.shape[1] * page_size) < tokens[:, None]  # [B, tokens]
  pages = jnp.where(valid[:, ::page_size], page_table, 0)
  kv = jnp.moveaxis(pool[pages], 2, 0).astype(jnp.float32)  # [2, B, N, page_size, kv_heads, D]
  kv = kv.reshape(2, batch, -1, kv_heads, head_dim)
  keys, values = jnp.where(valid[:, :, None, None], kv, 0)
  grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
  precision = jax.lax.Precision.HIGHEST
  scores = jnp.einsum("bhgd,bthd->bhgt", grouped, keys, precision=precision) * head_dim**-0.5
  scores = jnp.where(valid[:, None, None], scores, -jnp.inf)
  high = jnp.max(scores, axis=-1, initial=merge.NOTHING)
  weights = jnp.exp(scores - high[..., None])
  total = jnp.sum(weights, axis=-1)
  out = jnp.einsum("bhgt,bthd->bhgd", weights, values, precision=precision)
  some = (tokens > 0)[:, None, None]
  out = jnp.where(some[..., None], out / total[..., None], 0)
  lse = jnp.where(some, high + jnp.log(total), merge.NOTHING)
  return out.reshape(q.shape), lse.reshape(batch, heads)
