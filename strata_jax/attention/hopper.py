"""Attention on a Hopper GPU: decode and short chunks by this project's kernels, the rest by cuDNN.

cuDNN's kernel for single tokens takes as long for a padded row of a batch as for a valid one, and
for a short context as for the longest. The kernel takes the time of what is there: 5 rows of 20,000
tokens in a batch of 16 take 0.11 ms where cuDNN takes 0.31 (Llama-3.1-8B on an H200). What rows
share it reads once for several of them. Four chunks of 33 tokens, padded to 64, behind 20,000 take
0.14 ms instead of 0.19, three in a batch of four 0.11.
"""

import jax
import jax.numpy as jnp

from strata_jax.attention import cudnn, merge
from strata_jax.pallas_kernels.attention_parts import tiles
from strata_jax.pallas_kernels.chunk_attention import api as chunk_attention
from strata_jax.pallas_kernels.decode_attention import api as decode_attention

Plan = decode_attention.Plan | chunk_attention.Plan
_SHORT_CHUNK = 64  # tokens, padded: those that were measured


def supports(heads: int, pool: jax.ShapeDtypeStruct) -> bool:
  """Whether decode has a kernel for so many heads and a pool [pages, 2, page_size, kv_heads, D]."""
  q = jax.ShapeDtypeStruct((1, heads, pool.shape[-1]), pool.dtype)
  return decode_attention.supports(q, pool)


def decode_shares(heads: int) -> int:
  """Rows of a decode batch with so many heads that read pages which they share once."""
  return tiles.group_width(heads)


def plan_reads(
  page_table: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
  *,
  chunk: int,
  heads: int,
  kv_heads: int,
  page_size: int,
) -> Plan | None:
  """What `paged_attention` takes as `plan`, for chunks that are written; None: it takes none."""
  if chunk == 1:
    return decode_attention.make_plan(
      page_table, _tokens(starts + 1, lengths), heads=heads, kv_heads=kv_heads, page_size=page_size
    )
  if chunk > _SHORT_CHUNK or not chunk_attention.takes_pages(page_size):
    return None
  return chunk_attention.make_plan(starts, lengths, kv_heads=kv_heads, page_size=page_size)


def paged_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  pool: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
  *,
  plan: Plan | None = None,
  written: bool = True,
) -> jax.Array:
  """See `api.paged_attention`; like `cudnn.paged_attention`, which takes the other chunks.

  Raises:
    ValueError: what the one does not take which they are for, or a plan of another kind of chunk.
  """
  if q.shape[1] > 1:
    if written and q.shape[1] <= _SHORT_CHUNK and chunk_attention.supports(q, pool):
      if isinstance(plan, decode_attention.Plan):
        raise ValueError("plan: expected one of chunks, got one of single tokens")
      return chunk_attention.chunk_attention(q, pool, page_table, starts, lengths, plan=plan)
    return cudnn.paged_attention(q, k, v, pool, page_table, starts, lengths, written=written)
  if isinstance(plan, chunk_attention.Plan):
    raise ValueError("plan: expected one of single tokens, got one of chunks")
  tokens = _tokens(starts + 1 if written else starts, lengths)
  out, lse = decode_attention.decode_attention(
    q, pool, page_table, tokens, plan=plan if written else None
  )
  if written:
    return out
  token = cudnn.token_part(q, k, v)
  return merge.merge(merge.Partial(out.astype(jnp.float32), lse), token).out.astype(q.dtype)


def _tokens(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
  return jnp.where(lengths > 0, tokens, 0)
