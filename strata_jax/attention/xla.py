"""Attention in blocks of pages, for any XLA device.

The context part runs over the page table in blocks with an online softmax and stops at the longest
context of the batch, so that its cost follows the tokens that are there, not the padded table. The
chunk part is dense and causal. Both are merged by their log-sum-exp. K and V are never repeated for
grouped queries: a KV head's queries stand side by side as rows of one matrix.
"""

import jax
import jax.numpy as jnp

from strata_jax.attention import merge

_BLOCK_TOKENS = 256  # keys (context) or queries (chunk) in one block
_FLOOR = (
  -1e20
)  # the least maximum: exp(masked - _FLOOR) is 0, so that masked keys need no second mask


def paged_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  pool: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
  *,
  written: bool = True,
) -> jax.Array:
  """See `api.paged_attention`; a chunk of one token is read from the pool, if `written` there."""
  batch, chunk, heads, head_dim = q.shape
  kv_heads = k.shape[2]
  rows = _group_queries(q, kv_heads)
  if chunk == 1 and written:  # the token is in the pool, and sees everything up to itself
    part = context_part(rows, pool, page_table, jnp.where(lengths > 0, starts + 1, 0))
  else:
    part = merge.merge(
      context_part(rows, pool, page_table, jnp.where(lengths > 0, starts, 0)),
      chunk_part(rows, k, v),
    )
  out = part.out.reshape(batch, kv_heads, heads // kv_heads, chunk, head_dim)
  return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def context_part(
  rows: jax.Array, pool: jax.Array, page_table: jax.Array, tokens: jax.Array
) -> merge.Partial:
  """Attention over the first `tokens[b]` tokens in the pages of `page_table[b]`.

  Args:
    rows: scaled queries [B, kv_heads, R, head_dim].
    pool: [pages, 2, page_size, kv_heads, head_dim].
    page_table: int32 [B, N].
    tokens: int32 [B].

  Returns:
    out [B, kv_heads, R, head_dim], lse [B, kv_heads, R].
  """
  page_size = pool.shape[2]
  block_pages = min(max(1, _BLOCK_TOKENS // page_size), page_table.shape[1])
  block_tokens = block_pages * page_size
  page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % block_pages)))
  offsets = jnp.arange(block_tokens)

  def add_block(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    out, high, total = carry
    slots = jax.lax.dynamic_slice_in_dim(page_table, index * block_pages, block_pages, axis=1)
    kv = pool[slots]  # [B, pages, 2, page_size, kv_heads, head_dim]
    keys, values = (
      jnp.swapaxes(kv[:, :, i].reshape(kv.shape[0], block_tokens, *kv.shape[4:]), 1, 2)
      for i in (0, 1)
    )  # [B, kv_heads, block, head_dim]
    valid = index * block_tokens + offsets < tokens[:, None]  # [B, block]
    scores = jnp.where(valid[:, None, None], _products(rows, keys), merge.NOTHING)
    new_high = jnp.maximum(high, scores.max(axis=-1))
    weights = jnp.exp(scores - new_high[..., None])
    # Stale pages may hold anything, and 0 times NaN is NaN.
    values = jnp.where(valid[:, None, :, None], values, 0)
    kept = jnp.exp(high - new_high)
    out = out * kept[..., None] + _weighted(weights, values)
    return out, new_high, total * kept + weights.sum(axis=-1)

  shape = rows.shape[:-1]
  start = (
    jnp.zeros(rows.shape, jnp.float32),
    jnp.full(shape, _FLOOR, jnp.float32),
    jnp.zeros(shape, jnp.float32),
  )
  blocks = (jnp.max(tokens) + block_tokens - 1) // block_tokens
  out, high, total = jax.lax.fori_loop(0, blocks, add_block, start)
  empty = total == 0
  total = jnp.where(empty, 1.0, total)
  lse = jnp.where(empty, merge.NOTHING, high + jnp.log(total))
  return merge.Partial(out / total[..., None], lse)


def chunk_part(rows: jax.Array, k: jax.Array, v: jax.Array) -> merge.Partial:
  """Causal attention of a chunk over itself.

  Args:
    rows: scaled queries [B, kv_heads, G * T, head_dim], token by token within each of G heads.
    k: [B, T, kv_heads, head_dim].
    v: [B, T, kv_heads, head_dim].

  Returns:
    out [B, kv_heads, G * T, head_dim], lse [B, kv_heads, G * T].
  """
  batch, kv_heads, _, head_dim = rows.shape
  chunk = k.shape[1]
  keys, values = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)  # [B, kv_heads, T, head_dim]
  rows = rows.reshape(batch, kv_heads, -1, chunk, head_dim)
  parts = []
  for first in range(0, chunk, _BLOCK_TOKENS):  # no query needs the keys of later blocks
    end = min(first + _BLOCK_TOKENS, chunk)
    block = rows[:, :, :, first:end].reshape(batch, kv_heads, -1, head_dim)
    query = jnp.tile(jnp.arange(first, end), rows.shape[2])  # [G * block]
    # Padding comes after the valid tokens: none of them sees it.
    seen = jnp.arange(end) <= query[:, None]
    scores = jnp.where(seen, _products(block, keys[:, :, :end]), merge.NOTHING)
    high = scores.max(axis=-1)
    weights = jnp.exp(scores - high[..., None])
    total = weights.sum(axis=-1)
    out = _weighted(weights, values[:, :, :end]) / total[..., None]
    shape = (batch, kv_heads, -1, end - first)
    parts.append((out.reshape(*shape, head_dim), (high + jnp.log(total)).reshape(shape)))
  outs, lses = zip(*parts, strict=True)
  shape = (batch, kv_heads, -1)
  return merge.Partial(
    jnp.concatenate(outs, axis=3).reshape(*shape, head_dim),
    jnp.concatenate(lses, axis=3).reshape(shape),
  )


def _group_queries(q: jax.Array, kv_heads: int) -> jax.Array:
  """[B, T, heads, D] to scaled rows [B, kv_heads, G * T, D]."""
  batch, chunk, heads, head_dim = q.shape
  grouped = q.reshape(batch, chunk, kv_heads, heads // kv_heads, head_dim)
  rows = grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, head_dim)
  return rows * jnp.asarray(head_dim**-0.5, q.dtype)


def _products(rows: jax.Array, keys: jax.Array) -> jax.Array:
  return jnp.einsum(
    "bhrd,bhsd->bhrs", rows, keys.astype(rows.dtype), precision=_precision(rows),
    preferred_element_type=jnp.float32,
  )  # fmt: skip


def _weighted(weights: jax.Array, values: jax.Array) -> jax.Array:
  return jnp.einsum(
    "bhrs,bhsd->bhrd", weights.astype(values.dtype), values, precision=_precision(values),
    preferred_element_type=jnp.float32,
  )  # fmt: skip


def _precision(x: jax.Array) -> jax.lax.Precision:
  return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
