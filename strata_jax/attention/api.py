"""The public calls: write a chunk's K and V into its pages, and attend to everything so far.

A sequence of a batch is a context of `starts[b]` tokens whose KV lies in pages, followed by a chunk
of `lengths[b]` tokens (T is the padded chunk). Decode is the chunk of one token. The chunk is
written first and attended to afterwards: by data dependence alone the pool is then updated in
place, and no implementation can see a page that is written later. `unwritten_attention` is for
programs that can write only afterwards.
"""

import jax
import jax.numpy as jnp

from strata_jax.attention import cudnn, hopper, reference, xla

IMPLEMENTATIONS = {
  "reference": reference.paged_attention,
  "xla": xla.paged_attention,
  "cudnn": cudnn.paged_attention,  # GPUs alone
  "hopper": hopper.paged_attention,  # H100 and H200
}
Plan = hopper.Plan | None
UNWRITTEN = ("xla", "cudnn", "hopper")  # those that need not find the chunk in the pool


def write_kv(
  pool: jax.Array,
  k: jax.Array,
  v: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
) -> jax.Array:
  """Writes K and V of a chunk; positions from `lengths` on are dropped.

  Args:
    pool: one layer's pages [pages, 2, page_size, kv_heads, head_dim], best donated.
    k: [B, T, kv_heads, head_dim].
    v: [B, T, kv_heads, head_dim].
    page_table: int32 [B, N], slots of the context and the chunk in order; the rest is never used.
    starts: int32 [B], tokens before the chunk.
    lengths: int32 [B], valid tokens of the chunk; 0 for a padded sequence.

  Returns:
    The pool.
  """
  pages, _, page_size = pool.shape[:3]
  batch, chunk = k.shape[:2]
  offsets = jnp.arange(chunk)
  positions = starts[:, None] + offsets  # [B, T]
  slots = jnp.take_along_axis(page_table, positions // page_size, axis=1, mode="clip")
  # K and V of a token are rows of a pool seen as a list of rows: a scatter into one leading
  # dimension, which a GPU carries out in place; with two it would transpose the whole pool.
  rows = (2 * slots[..., None] + jnp.arange(2)) * page_size + (positions % page_size)[..., None]
  valid = (offsets < lengths[:, None])[..., None]
  beyond = 2 * pages * page_size + jnp.arange(2 * batch * chunk).reshape(rows.shape)  # dropped
  kv = jnp.stack([k, v], axis=2).astype(pool.dtype)  # [B, T, 2, kv_heads, head_dim]
  flat = pool.reshape(-1, *pool.shape[3:])
  flat = flat.at[jnp.where(valid, rows, beyond)].set(kv, mode="drop", unique_indices=True)
  return flat.reshape(pool.shape)


def plan_reads(
  page_table: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
  *,
  chunk: int,
  heads: int,
  kv_heads: int,
  page_size: int,
  implementation: str,
) -> Plan:
  """What `paged_attention` works out before it reads, which is the same in all layers.

  Args:
    page_table: as in `write_kv`.
    starts: as in `write_kv`.
    lengths: as in `write_kv`.
    chunk: T.
    heads: of the queries.
    kv_heads: of the pool.
    page_size: of the pool.
    implementation: a name in IMPLEMENTATIONS.

  Returns:
    For `paged_attention` with the same arguments; None: this implementation works nothing out.
  """
  if implementation != "hopper":
    return None
  return hopper.plan_reads(
    page_table, starts, lengths, chunk=chunk, heads=heads, kv_heads=kv_heads, page_size=page_size
  )


def paged_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  pool: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
  *,
  implementation: str,
  plan: Plan = None,
) -> jax.Array:
  """Causal attention of a chunk over its context and itself.

  Args:
    q: [B, T, num_heads, head_dim]; num_heads is a multiple of kv_heads (grouped queries).
    k: the chunk's K [B, T, kv_heads, head_dim], already in `pool` as well.
    v: the chunk's V, likewise.
    pool: one layer's pages [pages, 2, page_size, kv_heads, head_dim], after `write_kv`.
    page_table: as in `write_kv`.
    starts: as in `write_kv`.
    lengths: as in `write_kv`.
    implementation: a name in IMPLEMENTATIONS.
    plan: of `plan_reads`, if there is one.

  Returns:
    [B, T, num_heads, head_dim] in the dtype of q; rows from `lengths` on mean nothing but are
    finite.

  Raises:
    ValueError: an unknown implementation, or shapes and dtypes that it does not take.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"attention: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
    )
  # K and V are taken as the pool holds them, so that a hit and a computed token are alike.
  k, v = k.astype(pool.dtype), v.astype(pool.dtype)
  if plan is not None:
    return hopper.paged_attention(q, k, v, pool, page_table, starts, lengths, plan=plan)
  return IMPLEMENTATIONS[implementation](q, k, v, pool, page_table, starts, lengths)


def unwritten_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  pool: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
  *,
  implementation: str,
) -> jax.Array:
  """`paged_attention` with a pool that the chunk is not written to yet.

  No row of the batch may have a page in its context that the chunk of another one fills.

  Raises:
    ValueError: as there, and for `reference`, which reads the chunk from the pool.
  """
  if implementation not in UNWRITTEN:
    raise ValueError(
      f"unwritten_attention: expected one of {', '.join(UNWRITTEN)}, got {implementation!r}"
    )
  k, v = k.astype(pool.dtype), v.astype(pool.dtype)
  return IMPLEMENTATIONS[implementation](q, k, v, pool, page_table, starts, lengths, written=False)
