"""What chunk attention means, in plain jnp."""

import jax
import jax.numpy as jnp


def attend(
  q: jax.Array,
  pool: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
) -> jax.Array:
  """Causal softmax over a row's tokens up to each query's own, in float32.

  Args:
    q: [B, T, heads, D].
    pool: [pages, 2, page_size, kv_heads, D].
    page_table: int32 [B, N]; what lies beyond the pages of the valid tokens may be anything.
    starts: int32 [B], tokens before the chunk.
    lengths: int32 [B], valid tokens of the chunk.

  Returns:
    float32 [B, T, heads, D], 0 from `lengths` on.
  """
  (batch, chunk, heads, head_dim), (_, _, page_size, kv_heads, _) = q.shape, pool.shape
  tokens = jnp.where(lengths > 0, starts + lengths, 0)
  valid = jnp.arange(page_table.shape[1] * page_size) < tokens[:, None]  # [B, tokens]
  pages = jnp.where(valid[:, ::page_size], page_table, 0)
  kv = jnp.moveaxis(pool[pages], 2, 0).astype(jnp.float32)  # [2, B, N, page_size, kv_heads, D]
  kv = kv.reshape(2, batch, -1, kv_heads, head_dim)
  keys, values = jnp.where(valid[:, :, None, None], kv, 0)
  grouped = q.reshape(batch, chunk, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
  precision = jax.lax.Precision.HIGHEST
  scores = jnp.einsum("bqhgd,bthd->bhgqt", grouped, keys, precision=precision) * head_dim**-0.5
  positions = starts[:, None] + jnp.arange(chunk)  # [B, T]
  seen = jnp.arange(keys.shape[1]) <= positions[..., None]  # [B, T, tokens]
  seen &= valid[:, None]
  weights = jax.nn.softmax(scores, where=seen[:, None, None], axis=-1)
  out = jnp.einsum("bhgqt,bthd->bqhgd", weights, values, precision=precision)
  real = jnp.arange(chunk) < lengths[:, None]
  return jnp.where(real[..., None, None], out.reshape(q.shape), 0)
