"""The plain meaning: gather every page of the table, one masked softmax over all of it."""

import jax
import jax.numpy as jnp


def paged_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  pool: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
) -> jax.Array:
  """See `api.paged_attention`. Reads the chunk from the pool too; `k` and `v` are not used."""
  del k, v
  batch, chunk, heads, head_dim = q.shape
  tokens = page_table.shape[1] * pool.shape[2]
  kv = pool[page_table].astype(jnp.float32)  # [B, N, 2, page_size, kv_heads, head_dim]
  kv = jnp.moveaxis(kv, 2, 0).reshape(2, batch, tokens, -1, head_dim)
  keys, values = jnp.repeat(kv, heads // kv.shape[3], axis=3)  # [B, tokens, heads, head_dim]
  scores = jnp.einsum("bthd,bshd->bhts", q.astype(jnp.float32), keys, precision="highest")
  position = jnp.arange(tokens)
  query = starts[:, None] + jnp.arange(chunk)  # [B, T]
  seen = position <= query[:, :, None]  # [B, T, tokens]
  seen &= position < (starts + jnp.maximum(lengths, 1))[:, None, None]
  scores = jnp.where(seen[:, None], scores * head_dim**-0.5, -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1)
  return jnp.einsum("bhts,bshd->bthd", weights, values, precision="highest").astype(q.dtype)
