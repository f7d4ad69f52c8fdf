"""The public call of decode attention; pure and traceable, on a stream of its own too."""

import dataclasses
from typing import Literal

import flax.struct
import jax

from strata_jax import validation
from strata_jax.pallas_kernels import lowered_once
from strata_jax.pallas_kernels.attention_parts import checks, merge, tiles, work_line
from strata_jax.pallas_kernels.decode_attention import mosaic_gpu, mosaic_merge, reference

Implementation = Literal["mosaic_gpu", "reference"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeAttentionConfig:
  """How the kernel runs.

  Attributes:
    blocks: thread blocks of 128 threads that share the work; two an SM of an H100 or H200.
    tile_rows: rows of K, and as many of V, that a block reads in a step: tokens times KV heads.
      A multiple of 64; a pool whose pages do not fit it gets the nearest that fits.
    stages: tiles that a block has in flight or at hand. With 3 of 64 rows of 128 values, two
      blocks fill the shared memory of an SM.
    part_factor: how many times as many blocks may share a row as if all rows were valid. Up to
      that part of padding the device stays full.
    merge_kernel: whether parts of a row are merged by a kernel that reads only what a row has, or
      by XLA, which takes several launches and reads room for all.
    share_prefixes: whether rows whose tables begin with the same pages read them together, as many
      as a matrix product has room for: two of 32 heads.
  """

  blocks: int = 264
  tile_rows: int = 64
  stages: int = 3
  part_factor: int = 3
  merge_kernel: bool = True
  share_prefixes: bool = True

  def __post_init__(self) -> None:
    validation.check_int(self, "blocks", minimum=1, maximum=4096)
    validation.check_choice(self, "tile_rows", (64, 128, 192, 256))
    validation.check_int(self, "stages", minimum=1, maximum=16)
    validation.check_int(self, "part_factor", minimum=1, maximum=4096)
    validation.check_choice(self, "merge_kernel", (False, True))
    validation.check_choice(self, "share_prefixes", (False, True))


@flax.struct.dataclass
class Plan:
  """Who reads what. It takes a dozen small launches and is the same in all layers."""

  line: work_line.WorkLine
  groups: work_line.Groups
  tile: tiles.Tile = flax.struct.field(pytree_node=False)
  config: DecodeAttentionConfig = flax.struct.field(pytree_node=False)


def make_plan(
  page_table: jax.Array,
  tokens: jax.Array,
  *,
  heads: int,
  kv_heads: int,
  page_size: int,
  config: DecodeAttentionConfig | None = None,
) -> Plan:
  """The plan that `decode_attention` makes of these arguments if it gets none.

  Args:
    page_table: int32 [B, N].
    tokens: int32 [B].
    heads: of the queries.
    kv_heads: of the pool.
    page_size: of the pool, likewise.
    config: how the kernel runs.

  Raises:
    ValueError: pages that the kernel does not take.
  """
  config = config or DecodeAttentionConfig()
  tile = tiles.find_tile(kv_heads, page_size, config.tile_rows)
  if tile is None:
    raise ValueError(f"decode attention: {_page_problem(page_size, kv_heads)}")
  batch, width = len(tokens), _width(heads, len(tokens), config)
  if width > 1:
    groups = work_line.find_groups(page_table, tokens, width=width, tile=tile)
  else:
    groups = work_line.no_groups(batch)
  line = work_line.make_line(
    tokens, groups, width=width, tile=tile, blocks=config.blocks,
    most_parts=tiles.most_parts(batch, config.blocks, config.part_factor),
  )  # fmt: skip
  return Plan(line=line, groups=groups, tile=tile, config=config)


def decode_attention(
  q: jax.Array,
  pool: jax.Array,
  page_table: jax.Array,
  tokens: jax.Array,
  *,
  plan: Plan | None = None,
  implementation: Implementation = "mosaic_gpu",
  config: DecodeAttentionConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention of one query token a row over the tokens in its pages.

  The time is that of reading the KV of the valid tokens, what rows share once for several of them:
  rows of any length share the device evenly, and rows without tokens cost nothing.

  Args:
    q: bfloat16 [B, heads, D] or [B, 1, heads, D].
    pool: bfloat16 [pages, 2, page_size, kv_heads, D]; K of a page at [p, 0], V at [p, 1].
    page_table: int32 [B, N]; entries beyond the pages of a row's tokens are never read.
    tokens: int32 [B], at most N * page_size; 0 is a padded row.
    plan: of `make_plan` for the same tables, tokens, shapes and config, if there is one already.
      With one the kernels are lowered once for all programs, which takes half a second each, and
      called; no call may stand in a region with a stream of its own. The reference needs none.
    implementation: the kernel, or plain jnp.
    config: how the kernel runs; by default as with the plan, if there is one.

  Returns:
    Of the dtype and shape of q, 0 for padded rows; and the log-sum-exp of the scaled scores,
    float32 [B, heads] or [B, 1, heads], -1e30 for padded rows.

  Raises:
    ValueError: shapes that do not fit together, or that the kernel does not take (`supports`); a
      plan for others.
  """
  config = config or (plan.config if plan else DecodeAttentionConfig())
  _check(q, pool, page_table, tokens)
  shape = q.shape
  q = q.reshape(shape[0], *shape[-2:])
  if implementation == "reference":
    out, lse = reference.attend(q, pool, page_table, tokens)
  else:
    problem = _problem(q, pool, config)
    if problem:
      raise ValueError(f"decode attention: {problem}")
    if plan is None:
      heads, (_, _, page_size, kv_heads, _) = q.shape[1], pool.shape
      plan = make_plan(
        page_table, tokens, heads=heads, kv_heads=kv_heads, page_size=page_size, config=config
      )
      out, lse = _attend(q, pool, page_table, plan)
    else:
      _check_plan(plan, q, pool, config)
      out, lse = lowered_once.call(_attend, q, pool, page_table, plan)
  return out.astype(q.dtype).reshape(shape), lse.reshape(shape[:-1])


def supports(
  q: jax.Array | jax.ShapeDtypeStruct,
  pool: jax.Array | jax.ShapeDtypeStruct,
  config: DecodeAttentionConfig | None = None,
) -> bool:
  """Whether the kernel takes these shapes and dtypes, which must fit together."""
  return not _problem(q, pool, config or DecodeAttentionConfig())


def _attend(
  q: jax.Array, pool: jax.Array, page_table: jax.Array, plan: Plan
) -> tuple[jax.Array, jax.Array]:
  config = plan.config
  most_parts = tiles.most_parts(len(q), config.blocks, config.part_factor)
  out, lse = mosaic_gpu.attend(
    q, pool, page_table, plan.line, tile=plan.tile, stages=config.stages, most_parts=most_parts
  )
  how = mosaic_merge if config.merge_kernel else merge
  return how.merge_items(out, lse, plan.line, plan.groups, heads=q.shape[1], dtype=q.dtype)


def _width(heads: int, rows: int, config: DecodeAttentionConfig) -> int:
  """Most rows of a group."""
  return tiles.group_width(heads) if config.share_prefixes and rows > 1 else 1


def _problem(q, pool, config: DecodeAttentionConfig) -> str:
  """What the kernel does not take, or nothing."""
  heads, head_dim = q.shape[-2:]
  page_size, kv_heads = pool.shape[2:4]
  if problem := checks.kind_problem(q, pool):
    return problem
  if heads > tiles.QUERY_ROWS:
    return f"heads: expected at most {tiles.QUERY_ROWS}, got {heads}"
  tile = tiles.find_tile(kv_heads, page_size, config.tile_rows)
  if page_size % 8 or page_size > 64 or tile is None:
    return _page_problem(page_size, kv_heads)
  wanted_rows = tiles.QUERY_ROWS + 2 * config.stages * tile.rows
  what = f"{config.stages} tiles of {tile.rows} rows"
  return checks.memory_problem(wanted_rows, head_dim, what)


def _page_problem(page_size: int, kv_heads: int) -> str:
  return (
    "page_size: expected a multiple of 8, at most 64, of which a tile of 64, 128, 192 or 256 "
    f"rows has a whole number or an equal part, got {page_size} with {kv_heads} KV heads"
  )


def _check(q: jax.Array, pool: jax.Array, page_table: jax.Array, tokens: jax.Array) -> None:
  if q.ndim not in (3, 4) or (q.ndim == 4 and q.shape[1] != 1):
    raise ValueError(f"q: expected [B, heads, D] or [B, 1, heads, D], got {q.shape}")
  checks.check_fit(q, pool)
  if page_table.ndim != 2 or len(page_table) != len(q) or tokens.shape != q.shape[:1]:
    raise ValueError(
      f"page_table and tokens: expected [{len(q)}, N] and [{len(q)}], got {page_table.shape} and "
      f"{tokens.shape}"
    )


def _check_plan(plan: Plan, q, pool, config: DecodeAttentionConfig) -> None:
  rows, heads, _ = q.shape
  width = _width(heads, rows, config)
  tile = tiles.find_tile(pool.shape[3], pool.shape[2], config.tile_rows)
  expected = (rows if width == 1 else 2 * rows, width, tile, config)
  got = (*plan.line.members.shape, plan.tile, plan.config)
  if got != expected:
    raise ValueError(f"plan: expected (items, width, tile, config) of {expected}, got {got}")
