"""Decode attention on a GPU of the Hopper generation; see `api` for the arguments.

A page lies in memory as `page_size * kv_heads` rows of one head of one token each. A thread block
takes them as they lie: it multiplies the queries of all heads, which fill half of a matrix product
or all of it, with all of them, and masks what is another head's. Splitting the heads would cost as
many products, since a group of four queries needs as large a one, and would read rows far apart.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from strata_jax.pallas_kernels.attention_parts import products, tiles, work_line

_LOG2_E = math.log2(math.e)
_KEYS, _VALUES = 0, 1  # where they stand in a page


def attend(
  q: jax.Array,
  pool: jax.Array,
  page_table: jax.Array,
  line: work_line.WorkLine,
  *,
  tile: tiles.Tile,
  stages: int,
  most_parts: int,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention over the parts of every item, to be merged.

  Args:
    q: [B, heads, D].
    pool: [pages, 2, page_size, kv_heads, D].
    page_table: int32 [B, N].
    line: the items, and what each thread block does of them.
    tile: what is read at a time.
    stages: tiles in flight.
    most_parts: the size of the buffer of an item's parts.
    interpret: runs it on a CPU.

  Returns:
    float32 [items, most_parts, 64, D], normalised over a part, and its log-sum-exp, float32 [items,
    most_parts, 64]; the heads of a group's second row begin at `tiles.padded_heads`, and so on.
    What is beyond an item's parts or the heads of its members may be anything.
  """
  (_, heads, head_dim), group = q.shape, q.shape[1] // tile.kv_heads
  items, width = line.members.shape
  padded = tiles.padded_heads(heads)
  scale = head_dim**-0.5 * _LOG2_E  # of the scores, whose powers are of 2
  q = lax.pad(q, jnp.zeros((), q.dtype), ((0, 0, 0), (0, padded - heads, 0), (0, 0, 0)))

  def decode_attention(q, pool, table, *refs):
    line = work_line.WorkLine(*refs[: len(work_line.WorkLine._fields)])
    out, lse, q_smem, k_smem, v_smem, *barriers = refs[len(line) :]
    q_ready, k_ready, v_ready = barriers
    worker = lax.axis_index("block")
    share = line.share[0]
    mine = worker * share  # the first tile of this block; `share` of them are its own

    def visit(item, _):
      start, first_tile = line.starts[item], line.first_tiles[item]
      count = tile.count(line.tokens[item]) - first_tile
      begin = lax.max(mine - start, jnp.int32(0))
      end = lax.min(mine + share - start, count)

      @pl.when(begin < end)
      def _():
        part = worker - lax.div(start, share)
        attend_part(item, part, first_tile + begin, end - begin)

      return _

    def attend_part(item, part, begin, steps):
      row, row_tokens = line.members[item, 0], line.tokens[item]
      last_page = lax.div(row_tokens - 1, jnp.int32(tile.page_tokens))

      def look_up(step):
        """The pages of a tile, and where in each it begins."""
        position, offset = tile.place(begin + step)
        # A tile may reach beyond the last page. The mask hides what is read for it.
        positions = [lax.min(position + number, last_page) for number in range(tile.pages)]
        return [table[row, position] for position in positions], offset

      def fetch(step, found, kind):
        pages, offset = found
        slot = lax.rem(jnp.int32(step), jnp.int32(stages))
        smem, ready = ((k_smem, k_ready), (v_smem, v_ready))[kind]
        for number, page in enumerate(pages):
          source = pool.at[2 * page + kind, pl.ds(offset, tile.copy_rows)]
          target = smem.at[slot, pl.ds(number * tile.copy_rows, tile.copy_rows)]
          plgpu.copy_gmem_to_smem(source, target, ready.at[slot])

      # The rows of padding hold anything: no row of a product depends on another.
      for side in range(width):
        target = q_smem.at[pl.ds(side * padded, padded)]
        plgpu.copy_gmem_to_smem(q.at[line.members[item, side]], target, q_ready)
      for step in range(stages):

        @pl.when(step < steps)
        def _(step=step):
          found = look_up(step)
          fetch(step, found, _KEYS)
          fetch(step, found, _VALUES)

      plgpu.barrier_wait(q_ready)

      heads_axis, rows_axis = (
        plgpu.broadcasted_iota(
          jnp.int32, (tiles.QUERY_ROWS, tile.rows), axis, layout=plgpu.Layout.WGMMA
        )
        for axis in (0, 1)
      )
      kv_head = lax.div(_remainder(heads_axis, padded), jnp.int32(group))
      own_head = kv_head == _remainder(rows_axis, tile.kv_heads)

      def attend_tile(step, state, refill=lambda kind: None, valid_rows=None):
        acc, high, total = state
        slot = lax.rem(step, jnp.int32(stages))
        plgpu.barrier_wait(k_ready.at[slot])
        scores = products.multiply(q_smem, k_smem.at[slot].transpose((1, 0)))
        refill(_KEYS)
        mask = own_head if valid_rows is None else own_head & (rows_axis < valid_rows)
        scores = jnp.where(mask, scores, -jnp.inf)
        higher = lax.max(high, scores.max(axis=1) * scale)
        fade = jnp.exp2(high - higher)
        # One multiply-add each: so the scores are scaled here, not before their maximum.
        weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(higher, scores.shape, [0]))

        plgpu.barrier_wait(v_ready.at[slot])
        if valid_rows is not None:
          pl.when(valid_rows < tile.rows)(lambda: products.clear_tail(v_smem.at[slot], valid_rows))
        added = _multiply_registers(weights.astype(q.dtype), v_smem.at[slot], interpret)
        refill(_VALUES)
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0]) + added
        return acc, higher, total * fade + weights.sum(axis=1)

      def attend_and_fetch(step, state):
        following = step + stages
        found = look_up(following)  # here, so that it is there when it is wanted

        def refill(kind):
          pl.when(following < steps)(lambda: fetch(following, found, kind))

        return attend_tile(step, state, refill)

      state = products.nothing_yet(head_dim)
      state = lax.fori_loop(0, steps - 1, attend_and_fetch, state)
      # Only the last tile of a context may have rows without a token.
      left = row_tokens - (begin + steps - 1) * tile.tokens
      acc, high, total = attend_tile(steps - 1, state, valid_rows=left * tile.kv_heads)

      out[item, part] = acc / lax.broadcast_in_dim(total, acc.shape, [0])
      lse[item, part] = (high + jnp.log2(total)) * (1 / _LOG2_E)

    lax.fori_loop(line.first_items[worker], line.end_items[worker], visit, None)

  how = {
    "transforms": products.TRANSFORMS,
    "dtype": q.dtype,
  }
  return plgpu.kernel(
    decode_attention,
    out_type=(
      jax.ShapeDtypeStruct((items, most_parts, tiles.QUERY_ROWS, head_dim), jnp.float32),
      jax.ShapeDtypeStruct((items, most_parts, tiles.QUERY_ROWS), jnp.float32),
    ),
    scratch_types=(
      plgpu.SMEM((tiles.QUERY_ROWS, head_dim), **how),
      plgpu.SMEM((stages, tile.rows, head_dim), **how),
      plgpu.SMEM((stages, tile.rows, head_dim), **how),
      plgpu.Barrier(num_arrivals=width),
      plgpu.Barrier(num_arrivals=tile.pages, num_barriers=stages),
      plgpu.Barrier(num_arrivals=tile.pages, num_barriers=stages),
    ),
    grid=line.first_items.shape,
    grid_names=("block",),
    compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    interpret=interpret,
  )(q, pool.reshape(-1, tile.page_rows, head_dim), page_table, *line)


def _multiply_registers(left: jax.Array, right, interpret) -> jax.Array:
  """`products.multiply`, its left side in registers; the interpreter wants it in shared memory."""
  if interpret is None:
    return products.multiply(left, right)

  def multiply(staged):
    staged[...] = left
    plgpu.commit_smem()
    return products.multiply(staged, right)

  return pl.run_scoped(multiply, plgpu.SMEM(left.shape, left.dtype))


def _remainder(value: jax.Array, divisor: int) -> jax.Array:
  if divisor & (divisor - 1):
    return lax.rem(value, jnp.int32(divisor))
  return value & (divisor - 1)  # the compiler sees that it repeats
