"""Attention by cuDNN's fused kernels, for GPUs. The one module that uses JAX's private cuDNN API.

The context part reads the pages where they lie: `[pages, 2, page_size, ...]` is seen as `2 * pages`
blocks of K or V, K of page p in block 2p and V in block 2p + 1. cuDNN's causal masks are aligned to
the first key, which is wrong behind a context, so the chunk part is a call of its own and the two
are merged by their log-sum-exp.

For short chunks that kernel has two weaknesses, of which its kernel for single tokens is free. It
pads the queries of every head to a tile of their own, and reads the KV for each: here the queries
that share a KV head stand in one tile. And it gives all keys of a row to the same thread block:
where a batch has too few blocks to fill the device, the context is cut into parts that are rows of
their own, merged by their log-sum-exp. On an H200, chunks of 32 tokens behind 20,000 with the heads
of Llama-3.1-8B and pages of 32: 0.35 to 0.10 ms for one, 0.36 to 0.19 for 4, 1.26 to 0.43 for 16.
"""

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused

from strata_jax.attention import merge

_LARGEST_HEAD = 256  # on Hopper
_QUERY_TILE = 128  # queries of one head that share a thread block
_BLOCKS = 132  # thread blocks that fill a device: one an SM
_PART_TOKENS = 1024  # a part of a context has at least so many
_MOST_PARTS = 8


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
  """See `api.paged_attention`.

  A chunk of several tokens is never read from the pool; one of a single token is, if it is
  `written` there: then one kernel does it all.

  Raises:
    ValueError: not bfloat16, or a head that cuDNN does not take.
  """
  for name, array in (("q", q), ("pool", pool)):
    if array.dtype != jnp.bfloat16:
      raise ValueError(f"attention 'cudnn': {name}: expected bfloat16, got {array.dtype}")
  if q.shape[-1] > _LARGEST_HEAD or q.shape[-1] % 8:
    raise ValueError(
      f"attention 'cudnn': head_dim: expected a multiple of 8, at most {_LARGEST_HEAD}, "
      f"got {q.shape[-1]}"
    )
  if q.shape[1] == 1 and written:  # the token is in the pool, and sees everything up to itself
    tokens = jnp.where(lengths > 0, starts + 1, 0)
    out = _context_out(q, pool, page_table, tokens, stats=False)[0]
    return jnp.where((tokens > 0)[:, None, None, None], out, 0)
  context = _context_part(q, pool, page_table, jnp.where(lengths > 0, starts, 0))
  chunk = token_part(q, k, v) if q.shape[1] == 1 else _chunk_part(q, k, v)
  return merge.merge(context, chunk).out.astype(q.dtype)


def context_parts(q_shape: tuple[int, ...], pool_shape: tuple[int, ...], table_pages: int) -> int:
  """Into how many parts a context is cut.

  Args:
    q_shape: [B, T, heads, D].
    pool_shape: [pages, 2, page_size, kv_heads, D].
    table_pages: width of the page table.
  """
  page_size, kv_heads = pool_shape[2:4]
  batch, rows, heads = q_shape[0], q_shape[1], q_shape[2]
  if rows == 1:
    return 1
  if _packs(q_shape, kv_heads):
    rows, heads = rows * heads // kv_heads, kv_heads
  blocks = batch * heads * -(-rows // _QUERY_TILE)
  most = min(_MOST_PARTS, table_pages * page_size // _PART_TOKENS)
  return max(1, min(most, _BLOCKS // blocks))


def _packs(q_shape: tuple[int, ...], kv_heads: int) -> bool:
  """Whether the queries that share a KV head stand in one tile: else each head reads the KV."""
  return kv_heads < q_shape[2] and 1 < q_shape[1] < _QUERY_TILE


def _context_part(
  q: jax.Array, pool: jax.Array, page_table: jax.Array, tokens: jax.Array
) -> merge.Partial:
  """Attention over the first `tokens[b]` tokens of the pages: [B, T, heads, D], [B, T, heads]."""
  parts = context_parts(q.shape, pool.shape, page_table.shape[1])
  if parts == 1:
    return _one_part(q, pool, page_table, tokens)
  batch, width = len(q), -(-page_table.shape[1] // parts)
  table = jnp.pad(page_table, ((0, 0), (0, parts * width - page_table.shape[1])))
  part_tokens = width * pool.shape[2]
  left = tokens[:, None] - part_tokens * jnp.arange(parts)  # [B, parts]
  part = _one_part(
    jnp.repeat(q, parts, axis=0), pool, table.reshape(batch * parts, width),
    jnp.clip(left, 0, part_tokens).reshape(-1),
  )  # fmt: skip
  return merge.merge_all(
    merge.Partial(*(a.reshape(batch, parts, *a.shape[1:]) for a in part)), axis=1
  )


def _one_part(
  q: jax.Array, pool: jax.Array, page_table: jax.Array, tokens: jax.Array
) -> merge.Partial:
  """`_context_part` by one call."""
  out, stats = _context_out(q, pool, page_table, tokens, stats=True)
  some = (tokens > 0)[:, None, None]
  lse = jnp.where(some, jnp.swapaxes(stats, 1, 2), merge.NOTHING)
  return merge.Partial(jnp.where(some[..., None], out, 0).astype(jnp.float32), lse)


def _chunk_part(q: jax.Array, k: jax.Array, v: jax.Array) -> merge.Partial:
  """Causal attention of a chunk over itself; padding comes last, so that no valid token sees it."""
  out, stats = _call(q, k, v, fused.MaskType.CAUSAL, stats=True)
  return merge.Partial(out.astype(jnp.float32), jnp.swapaxes(stats, 1, 2))


def token_part(q: jax.Array, k: jax.Array, v: jax.Array) -> merge.Partial:
  """Attention of one token over itself: its value, and its score as the log-sum-exp."""
  group = q.shape[2] // k.shape[2]
  keys, values = (jnp.repeat(a, group, axis=2).astype(jnp.float32) for a in (k, v))
  scores = jnp.sum(q.astype(jnp.float32) * keys, axis=-1) * q.shape[-1] ** -0.5
  return merge.Partial(values, scores)


def _context_out(
  q: jax.Array, pool: jax.Array, page_table: jax.Array, tokens: jax.Array, *, stats: bool
) -> list[jax.Array]:
  """[B, T, heads, D], and with `stats` the log-sum-exp, float32 [B, heads, T]."""
  blocks = pool.reshape(-1, *pool.shape[2:])  # [2 * pages, page_size, kv_heads, head_dim]
  table = 2 * page_table[:, None, :, None]  # [B, 1, N, 1]
  keys = jnp.maximum(tokens, 1)  # a row without any is masked by the caller
  (batch, chunk, heads, head_dim), kv_heads = q.shape, pool.shape[3]
  packed = _packs(q.shape, kv_heads)
  group = heads // kv_heads
  if packed:  # no mask tells the queries of a context apart: [B, T * group, kv_heads, D]
    q = q.reshape(batch, chunk, kv_heads, group, head_dim).swapaxes(2, 3)
    q = q.reshape(batch, chunk * group, kv_heads, head_dim)
  queries = jnp.full(tokens.shape, q.shape[1], jnp.int32)
  out, *lse = _call(
    q, blocks, blocks, fused.MaskType.PADDING, (queries, keys), (table, table + 1), stats=stats
  )
  if not packed:
    return [out, *lse]
  out = out.reshape(batch, chunk, group, kv_heads, head_dim).swapaxes(2, 3)
  lse = [one.reshape(batch, kv_heads, chunk, group).swapaxes(2, 3) for one in lse]
  shape = (batch, heads, chunk)
  return [out.reshape(batch, chunk, heads, head_dim), *(one.reshape(shape) for one in lse)]


def _call(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: fused.MaskType,
  lengths: tuple[jax.Array, jax.Array] | None = None,
  tables: tuple[jax.Array, jax.Array] | None = None,
  *,
  stats: bool,
) -> list[jax.Array]:
  """The kernel: [B, T, heads, D], and with `stats` the log-sum-exp, float32 [B, heads, T].

  The primitive itself, for two reasons: the public call takes a pool only if it has exactly the
  pages of its tables, and it is a call with rules for sharding, which has no place in a region of a
  program that runs on a stream of its own.
  """
  unused = jnp.zeros(0, q.dtype)
  return fused._dot_product_attention_fwd_p.bind(
    q, k, v,
    unused,  # bias
    *(lengths or (unused, unused)),
    unused, unused,  # offsets of packed sequences
    *(tables or (unused, unused)),
    scale=q.shape[-1] ** -0.5, seed=0, dropout_rate=0.0, variadic_args=(False, False),
    mask_type=mask, layout=fused.AttentionLayout.BTNH.value, sliding_window_length=None,
    is_training=stats,
  )  # fmt: skip
