"""Chunk attention on a GPU of the Hopper generation; see `api` for the arguments.

A thread block has one KV head and the queries that read it: of every token a group of heads, one
below the other, so that a matrix product is full. Some warpgroups multiply, 64 rows of queries
each, with tiles of keys that a further one brings from the pages into a ring in shared memory
(FlashAttention-3, arXiv 2407.08608). Contexts are far longer than chunks: the tiles of a row are
shared by several thread blocks, whose partial results are merged (Flash-Decoding).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from strata_jax.pallas_kernels.attention_parts import merge, products, tiles, work_line

_LOG2_E = math.log2(math.e)
_KEYS, _VALUES = 0, 1  # where they stand in a page
_ROWS = tiles.QUERY_ROWS
# Registers of a thread that multiplies, by the number of warpgroups that do, and of one that loads:
# together with it they have the 65,536 of a multiprocessor. One warpgroup has enough as it is.
_REGISTERS = {2: 232, 3: 160}
_LOADER_REGISTERS = 32


def attend(
  q: jax.Array,
  pool: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
  line: work_line.WorkLine,
  *,
  group: int,
  tile: tiles.Tile,
  warpgroups: int,
  stages: int,
  most_parts: int,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention over the parts of every row of the batch, to be merged.

  Args:
    q: [B, kv_heads, rows, D]: the queries of a KV head, a group of every token in turn; a multiple
      of 64 with padding at the end.
    pool: [pages, 2, page_size, kv_heads, D].
    page_table: int32 [B, N].
    starts: int32 [B], tokens before the chunks.
    lengths: int32 [B], valid tokens of the chunks.
    line: the rows of the batch as items, and what each thread block of a KV head does of them.
    group: queries of a token that read the same KV head.
    tile: of one KV head, what is read at a time.
    warpgroups: that multiply, 1 to 3.
    stages: tiles in flight.
    most_parts: the size of the buffer of a row's parts.
    interpret: runs it on a CPU.

  Returns:
    float32 [B, most_parts, kv_heads, rows, D], normalised over a part, and its log-sum-exp, float32
    [B, most_parts, kv_heads, rows]. What is beyond a row's parts, or its valid queries, may be
    anything.
  """
  batch, kv_heads, rows, head_dim = q.shape
  block_rows = _ROWS * warpgroups
  shifts_registers = interpret is None and warpgroups in _REGISTERS
  scale = head_dim**-0.5 * _LOG2_E  # of the scores, whose powers are of 2

  def chunk_attention(q, pool, table, starts, lengths, *refs):
    line = work_line.WorkLine(*refs[: len(work_line.WorkLine._fields)])
    out, lse, q_smem, k_smem, v_smem, *barriers = refs[len(line) :]
    q_ready, q_free, k_ready, k_free, v_ready, v_free, cleared, *staged = barriers
    head, worker = lax.axis_index("head"), lax.axis_index("block")
    warpgroup = lax.axis_index("warpgroup")
    share = line.share[0]
    mine = worker * share  # the first tile of this block; `share` of them are its own

    def visit_all(do_part: Callable) -> tuple[jax.Array, jax.Array]:
      """Calls it for what this block does of each row; returns the number of parts and tiles."""

      def visit(row, done):
        start, count = line.starts[row], tile.count(line.tokens[row])
        begin = lax.max(mine - start, jnp.int32(0))
        steps = lax.max(lax.min(mine + share - start, count) - begin, jnp.int32(0))
        part = worker - lax.div(start, share)
        queries = lengths[row] * group  # those of a token stand together: padding is at the end
        turns = lax.select(steps > 0, tiles.ceil_div(queries, block_rows), jnp.int32(0))

        def take_turn(turn, done):
          first_query = turn * block_rows
          do_part(row, part, begin, steps, first_query, queries - first_query, *done)
          return done[0] + 1, done[1] + steps

        return lax.fori_loop(0, turns, take_turn, done)

      nothing = jnp.int32(0), jnp.int32(0)
      return lax.fori_loop(line.first_items[worker], line.end_items[worker], visit, nothing)

    def load_part(row, part, begin, steps, first_query, valid, visits, steps_done):
      del part
      last_page = lax.div(line.tokens[row] - 1, jnp.int32(tile.page_tokens))

      pl.when(visits > 0)(lambda: plgpu.barrier_wait(q_free))
      for number in range(warpgroups):

        @pl.when(number * _ROWS < valid)
        def _(number=number):
          source = q.at[row, head, pl.ds(first_query + number * _ROWS, _ROWS)]
          plgpu.copy_gmem_to_smem(source, q_smem.at[number], q_ready.at[number])

      def fetch(step, _):
        done = steps_done + step
        slot = lax.rem(done, jnp.int32(stages))
        position, offset = tile.place(begin + step)
        # A tile may reach beyond the last page. The mask hides what is read for it.
        positions = [lax.min(position + number, last_page) for number in range(tile.pages)]
        pages = [table[row, position] for position in positions]
        for kind, smem, ready, free in (
          (_KEYS, k_smem, k_ready, k_free),
          (_VALUES, v_smem, v_ready, v_free),
        ):
          pl.when(done >= stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
          for number, page in enumerate(pages):
            source = pool.at[2 * page + kind, pl.ds(offset, tile.copy_rows), head]
            target = smem.at[slot, pl.ds(number * tile.copy_rows, tile.copy_rows)]
            plgpu.copy_gmem_to_smem(source, target, ready.at[slot])
        return _

      lax.fori_loop(0, steps, fetch, None)

    def attend_part(row, part, begin, steps, first_query, valid, visits, steps_done):
      del visits
      start, length, row_tokens = starts[row], lengths[row], line.tokens[row]
      last_valid = row_tokens - begin * tile.tokens  # of the last tile's rows, those with a token

      def clear_tail(slot, step):
        """One warpgroup does it, the others wait."""
        left = last_valid - step * tile.tokens

        @pl.when(left < tile.tokens)
        def _():
          pl.when(warpgroup == 0)(lambda: products.clear_tail(v_smem.at[slot], left))
          plgpu.barrier_arrive(cleared)
          plgpu.barrier_wait(cleared)

      def multiply():
        plgpu.barrier_wait(q_ready.at[warpgroup])
        shape = _ROWS, tile.tokens
        rows_axis, keys_axis = (
          plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
          for axis in (0, 1)
        )

        def attend_tile(step, state, masked=False):
          acc, high, total = state
          slot = lax.rem(steps_done + step, jnp.int32(stages))
          plgpu.barrier_wait(k_ready.at[slot])
          scores = products.multiply(q_smem.at[warpgroup], k_smem.at[slot].transpose((1, 0)))
          plgpu.barrier_arrive(k_free.at[slot])
          seen = None
          if masked:  # tokens of padding see what the last valid one does
            token = lax.div(first_query + warpgroup * _ROWS + rows_axis, jnp.int32(group))
            sees = start + lax.min(token, length - 1) - (begin + step) * tile.tokens
            seen = keys_axis <= sees
            scores = jnp.where(seen, scores, merge.NOTHING)
          higher = lax.max(high, scores.max(axis=1) * scale)
          fade = jnp.exp2(high - higher)
          weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(higher, scores.shape, [0]))
          if seen is not None:  # for a query without any, what rounds to 0 above may be anything
            weights = jnp.where(seen, weights, 0.0)
          total = total * fade + weights.sum(axis=1)
          acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
          weights = weights.astype(q.dtype)
          plgpu.barrier_wait(v_ready.at[slot])
          if masked:
            clear_tail(slot, step)
          if staged:  # the interpreter wants the left side in shared memory
            weights_smem = staged[0].at[warpgroup]
            weights_smem[...] = weights
            plgpu.commit_smem()
            acc = acc + products.multiply(weights_smem, v_smem.at[slot])
          else:
            acc = _add_product(acc, weights, v_smem.at[slot])
          plgpu.barrier_arrive(v_free.at[slot])
          return acc, higher, total

        whole = lax.div(start, jnp.int32(tile.tokens)) - begin  # tiles that all queries see
        whole = lax.clamp(jnp.int32(0), whole, steps)
        state = lax.fori_loop(0, whole, attend_tile, products.nothing_yet(head_dim))
        acc, high, total = lax.fori_loop(
          whole, steps, lambda step, state: attend_tile(step, state, masked=True), state
        )
        own = pl.ds(first_query + warpgroup * _ROWS, _ROWS)
        some = lax.max(total, jnp.float32(1e-30))  # the last tiles are beyond the first queries
        out.at[row, part, head, own][...] = acc / lax.broadcast_in_dim(some, acc.shape, [0])
        scores = (high + jnp.log2(some)) * (1 / _LOG2_E)
        lse.at[row, part, head, own][...] = jnp.where(total > 0.0, scores, merge.NOTHING)

      def pass_by():
        """Without a valid query: takes part in what all wait for."""

        def pass_tile(step, _):
          slot = lax.rem(steps_done + step, jnp.int32(stages))
          plgpu.barrier_wait(k_ready.at[slot])
          plgpu.barrier_arrive(k_free.at[slot])
          plgpu.barrier_wait(v_ready.at[slot])
          clear_tail(slot, step)
          plgpu.barrier_arrive(v_free.at[slot])
          return _

        lax.fori_loop(0, steps, pass_tile, None)

      is_valid = warpgroup * _ROWS < valid
      pl.when(is_valid)(multiply)
      pl.when(~is_valid)(pass_by)
      plgpu.barrier_arrive(q_free)

    @pl.when(warpgroup == warpgroups)
    def _():
      if shifts_registers:
        plgpu.set_max_registers(_LOADER_REGISTERS, action="decrease")
      visits, steps = visit_all(load_part)
      # A barrier ends with as many waits as it has been through.
      pl.when(visits > 0)(lambda: plgpu.barrier_wait(q_free))
      for slot in range(stages):

        @pl.when(slot < steps)
        def _(slot=slot):
          plgpu.barrier_wait(k_free.at[slot])
          plgpu.barrier_wait(v_free.at[slot])

    @pl.when(warpgroup < warpgroups)
    def _():
      if shifts_registers:
        plgpu.set_max_registers(_REGISTERS[warpgroups], action="increase")
      visit_all(attend_part)

  how = {
    "transforms": products.TRANSFORMS,
    "dtype": q.dtype,
  }
  return plgpu.kernel(
    chunk_attention,
    out_type=(
      jax.ShapeDtypeStruct((batch, most_parts, kv_heads, rows, head_dim), jnp.float32),
      jax.ShapeDtypeStruct((batch, most_parts, kv_heads, rows), jnp.float32),
    ),
    scratch_types=(
      plgpu.SMEM((warpgroups, _ROWS, head_dim), **how),
      plgpu.SMEM((stages, tile.rows, head_dim), **how),
      plgpu.SMEM((stages, tile.rows, head_dim), **how),
      plgpu.Barrier(num_arrivals=1, num_barriers=warpgroups),
      plgpu.Barrier(num_arrivals=warpgroups),
      *(
        plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
        for arrivals in (tile.pages, warpgroups) * 2
      ),
      plgpu.Barrier(num_arrivals=warpgroups),
      *([plgpu.SMEM((warpgroups, _ROWS, tile.rows), q.dtype)] if interpret else []),
    ),
    grid=(*line.first_items.shape, kv_heads),
    grid_names=("block", "head"),
    num_threads=warpgroups + 1,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    interpret=interpret,
  )(q, pool.reshape(-1, *pool.shape[2:]), page_table, starts, lengths, *line)


def _add_product(acc: jax.Array, left: jax.Array, right) -> Any:
  return pl.run_state(lambda acc: plgpu.wgmma(acc, left, right))(plgpu.ACC.init(acc))
