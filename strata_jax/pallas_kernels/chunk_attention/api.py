"""The public call of chunk attention; pure and traceable."""

import dataclasses
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp

from strata_jax import validation
from strata_jax.pallas_kernels import lowered_once
from strata_jax.pallas_kernels.attention_parts import checks, merge, tiles, work_line
from strata_jax.pallas_kernels.chunk_attention import mosaic_gpu, reference

Implementation = Literal["mosaic_gpu", "reference"]
TILE_TOKENS = 64  # of K, and as many of V, that are read in a step


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkAttentionConfig:
  """How the kernel runs.

  Attributes:
    blocks: thread blocks that share the work, those of all KV heads together; one an SM of an H100
      or H200.
    warpgroups: that multiply in a thread block, 64 queries of a KV head each. Where a chunk has
      more valid ones, the KV is read once more for the rest.
    stages: tiles of 64 tokens of K, and as many of V, in flight or at hand.
    part_factor: how many times as many blocks may share a row as if all rows were valid. Up to
      that part of padding the device stays full.
  """

  blocks: int = 132
  warpgroups: int = 3
  stages: int = 4
  part_factor: int = 2

  def __post_init__(self) -> None:
    validation.check_int(self, "blocks", minimum=1, maximum=4096)
    validation.check_int(self, "warpgroups", minimum=1, maximum=3)
    validation.check_int(self, "stages", minimum=1, maximum=16)
    validation.check_int(self, "part_factor", minimum=1, maximum=4096)


@flax.struct.dataclass
class Plan:
  """Who reads what, the same in all layers."""

  line: work_line.WorkLine
  tile: tiles.Tile = flax.struct.field(pytree_node=False)
  config: ChunkAttentionConfig = flax.struct.field(pytree_node=False)


def make_plan(
  starts: jax.Array,
  lengths: jax.Array,
  *,
  kv_heads: int,
  page_size: int,
  config: ChunkAttentionConfig | None = None,
) -> Plan:
  """The plan that `chunk_attention` makes of these arguments if it gets none.

  Args:
    starts: int32 [B].
    lengths: int32 [B].
    kv_heads: of the pool.
    page_size: of the pool, likewise.
    config: how the kernel runs.

  Raises:
    ValueError: pages that the kernel does not take.
  """
  config = config or ChunkAttentionConfig()
  if problem := _page_problem(page_size):
    raise ValueError(f"chunk attention: {problem}")
  tokens = jnp.where(lengths > 0, starts + lengths, 0)
  tile = tiles.Tile(rows=TILE_TOKENS, kv_heads=1, page_rows=page_size)  # of one KV head
  blocks, batch = _blocks(kv_heads, config), len(starts)
  line = work_line.make_line(
    tokens, work_line.no_groups(batch), width=1, tile=tile, blocks=blocks,
    most_parts=tiles.most_parts(batch, blocks, config.part_factor),
  )  # fmt: skip
  return Plan(line=line, tile=tile, config=config)


def chunk_attention(
  q: jax.Array,
  pool: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
  *,
  plan: Plan | None = None,
  implementation: Implementation = "mosaic_gpu",
  config: ChunkAttentionConfig | None = None,
) -> jax.Array:
  """Causal attention of a chunk of new tokens a row over the tokens before it and itself.

  The KV of a row is read once for 64 queries of each warpgroup, by thread blocks that share the
  rows of any length evenly; products and rows of nothing but padding cost nothing.

  Args:
    q: bfloat16 [B, T, heads, D].
    pool: bfloat16 [pages, 2, page_size, kv_heads, D]; K of a page at [p, 0], V at [p, 1]. The KV
      of the chunks is in it.
    page_table: int32 [B, N]; entries beyond the pages of a row's tokens are never read.
    starts: int32 [B], tokens before the chunks.
    lengths: int32 [B], valid tokens of the chunks; 0 is a padded row.
    plan: of `make_plan` for the same arguments and config, if there is one already. With one the
      kernel is lowered once for all programs, which takes half a second, and called; no call may
      stand in a region with a stream of its own. The reference needs none.
    implementation: the kernel, or plain jnp.
    config: how the kernel runs; by default as with the plan, if there is one.

  Returns:
    Of the dtype and shape of q, 0 from `lengths` on.

  Raises:
    ValueError: shapes that do not fit together, or that the kernel does not take (`supports`); a
      plan for others.
  """
  config = config or (plan.config if plan else ChunkAttentionConfig())
  _check(q, pool, page_table, starts, lengths)
  if implementation == "reference":
    return reference.attend(q, pool, page_table, starts, lengths).astype(q.dtype)
  if problem := _problem(q, pool, config):
    raise ValueError(f"chunk attention: {problem}")
  operands = q, pool, page_table, starts, lengths
  if plan is not None:
    _check_plan(plan, q, pool, config)
    return lowered_once.call(_attend, *operands, plan)
  _, _, page_size, kv_heads, _ = pool.shape
  plan = make_plan(starts, lengths, kv_heads=kv_heads, page_size=page_size, config=config)
  return _attend(*operands, plan)


def supports(
  q: jax.Array | jax.ShapeDtypeStruct,
  pool: jax.Array | jax.ShapeDtypeStruct,
  config: ChunkAttentionConfig | None = None,
) -> bool:
  """Whether the kernel takes these shapes and dtypes, which must fit together."""
  return not _problem(q, pool, config or ChunkAttentionConfig())


def takes_pages(page_size: int) -> bool:
  """Whether the kernel takes pages of so many tokens."""
  return not _page_problem(page_size)


def _attend(
  q: jax.Array,
  pool: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
  plan: Plan,
) -> jax.Array:
  (batch, chunk, heads, head_dim), kv_heads, config = q.shape, pool.shape[3], plan.config
  group = heads // kv_heads
  valid = chunk * group  # queries of a KV head, padding of the chunk included
  rows = -(-valid // tiles.QUERY_ROWS) * tiles.QUERY_ROWS
  grouped = q.reshape(batch, chunk, kv_heads, group, head_dim).swapaxes(1, 2)
  grouped = grouped.reshape(batch, kv_heads, valid, head_dim)
  grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, rows - valid), (0, 0)))
  out, lse = mosaic_gpu.attend(
    grouped, pool, page_table, starts, lengths, plan.line, group=group, tile=plan.tile,
    warpgroups=min(config.warpgroups, rows // tiles.QUERY_ROWS), stages=config.stages,
    most_parts=tiles.most_parts(batch, _blocks(kv_heads, config), config.part_factor),
  )  # fmt: skip
  parts = out.shape[1]
  out = out[:, :, :, :valid].reshape(batch, parts, kv_heads * valid, head_dim)
  lse = lse[:, :, :, :valid].reshape(batch, parts, kv_heads * valid)
  merged, _ = merge.merge_parts(out, lse, plan.line.parts)
  merged = merged.reshape(batch, kv_heads, chunk, group, head_dim).swapaxes(1, 2)
  is_token = (jnp.arange(chunk) < lengths[:, None])[..., None, None]
  return jnp.where(is_token, merged.reshape(q.shape), 0).astype(q.dtype)


def _blocks(kv_heads: int, config: ChunkAttentionConfig) -> int:
  """Of one KV head."""
  return max(1, config.blocks // kv_heads)


def _problem(q, pool, config: ChunkAttentionConfig) -> str:
  """What the kernel does not take, or nothing."""
  if problem := checks.kind_problem(q, pool) or _page_problem(pool.shape[2]):
    return problem
  wanted_rows = config.warpgroups * tiles.QUERY_ROWS + 2 * config.stages * TILE_TOKENS
  what = f"{config.stages} stages and {config.warpgroups} warpgroups"
  return checks.memory_problem(wanted_rows, q.shape[-1], what)


def _page_problem(page_size: int) -> str:
  if page_size % 8 or (TILE_TOKENS % page_size and page_size % TILE_TOKENS):
    return f"page_size: expected 8, 16, 32 or a multiple of {TILE_TOKENS}, got {page_size}"
  return ""


def _check(q, pool, page_table, starts, lengths) -> None:
  if q.ndim != 4:
    raise ValueError(f"q: expected [B, T, heads, D], got {q.shape}")
  checks.check_fit(q, pool)
  batch = q.shape[0]
  if page_table.ndim != 2 or {len(page_table), *starts.shape, *lengths.shape} != {batch}:
    raise ValueError(
      f"page_table, starts and lengths: expected [{batch}, N], [{batch}] and [{batch}], got "
      f"{page_table.shape}, {starts.shape} and {lengths.shape}"
    )


def _check_plan(plan: Plan, q, pool, config: ChunkAttentionConfig) -> None:
  expected = len(q), _blocks(pool.shape[3], config), pool.shape[2], config
  line, page_size = plan.line, plan.tile.page_rows
  got = len(line.starts), len(line.first_items), page_size, plan.config
  if got != expected:
    raise ValueError(f"plan: expected (rows, blocks a KV head, page, config) {expected}, got {got}")
