"""Who attends to what: rows that begin with the same pages read them together.

A matrix product has room for the heads of several rows. So up to `width` rows whose tables begin
with the same pages become a group: its leader's pages are read once, for the queries of all. What a
row has beyond them, or all of it without a group, it attends to alone. The parts are merged like
those that thread blocks share anyway (prefix sharing as in Hydragen, arXiv 2402.05099, and
ChunkAttention, arXiv 2402.15220, found in the page tables alone).

Plain arithmetic on small arrays, without loops and inner calls: a program of many layers has it
once, and it may stand in a region with a stream of its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from strata_jax.pallas_kernels.attention_parts import tiles
from strata_jax.pallas_kernels.attention_parts.sharing import (
  LEAST_SHARED_PART,
  LEAST_SHARED_TOKENS,
)

# An item takes a thread block as long as so many tiles besides its own. Without such gaps in the
# line one block would have the short ends of all rows.
_ITEM_TILES = 6


class Groups(NamedTuple):
  """Rows that read their first tokens together; a row without others is led by itself."""

  leaders: jax.Array  # int32 [B]
  sides: jax.Array  # int32 [B], which of its group a row is; the leader is 0
  shared_tokens: jax.Array  # int32 [B], equal in a group; 0: it attends alone


class WorkLine(NamedTuple):
  """The tiles of all items in one line, of which every thread block takes an equal share.

  Before each item there is a gap, for what it costs to begin with one.

  Items 0 to B - 1 are what rows attend to alone, with groups B to 2B - 1 what groups do, each under
  the number of its leader. Items without tiles are there as well.
  """

  starts: jax.Array  # int32 [items], where in the line an item starts
  first_tiles: jax.Array  # int32 [items], the first tile of the leader's context
  tokens: jax.Array  # int32 [items], where in that context it ends
  members: jax.Array  # int32 [items, width], rows whose queries attend; leader first, repeated
  parts: jax.Array  # int32 [items], thread blocks that share an item
  first_items: jax.Array  # int32 [blocks], what a block looks at first
  end_items: jax.Array  # int32 [blocks], and where it stops
  share: jax.Array  # int32 [1], tiles a block


def find_groups(
  page_table: jax.Array, tokens: jax.Array, *, width: int, tile: tiles.Tile
) -> Groups:
  """Groups of up to `width` rows, in the order of the batch.

  Rows are alike that have at least a quarter of the longest context in common, so that a short
  prompt which all begin with does not put rows together that go different ways behind it. (To be
  alike is transitive: three rows have in common what the less similar two have.)

  Args:
    page_table: int32 [B, N]; anything beyond the pages of a row's tokens.
    tokens: int32 [B].
    width: most rows of a group.
    tile: what is shared are whole tiles of whole pages.
  """
  batch, pages = page_table.shape
  square = batch, batch
  rows, others = (lax.broadcasted_iota(jnp.int32, square, axis) for axis in (0, 1))
  index = lax.broadcasted_iota(jnp.int32, (*square, pages), 2)
  equal = page_table[:, None] == page_table[None]
  differs = lax.select(equal, jnp.full_like(index, pages), index)
  common = jnp.min(differs, axis=2) * tile.page_tokens  # [B, B]
  common = lax.min(common, lax.min(tokens[:, None], tokens[None]))
  unit = max(tile.tokens, tile.page_tokens)  # one is a multiple of the other
  common = lax.div(common, jnp.int32(unit)) * unit
  least = lax.div(jnp.max(tokens), jnp.int32(LEAST_SHARED_PART))
  least = lax.max(least, jnp.int32(LEAST_SHARED_TOKENS))
  alike = (common >= least) | (rows == others)

  zeros = jnp.zeros_like(rows)
  ranks = jnp.sum(alike & (others < rows), axis=1, dtype=jnp.int32)
  sides = lax.rem(ranks, jnp.int32(width))
  leads = alike & (ranks[None] == (ranks - sides)[:, None])  # the column of a row's leader
  leaders = jnp.sum(lax.select(leads, others, zeros), axis=1, dtype=jnp.int32)
  with_leader = jnp.sum(lax.select(leads, common, zeros), axis=1, dtype=jnp.int32)
  together = leaders[:, None] == leaders[None]
  theirs = lax.broadcast_in_dim(with_leader, square, (1,))
  most = jnp.full_like(rows, jnp.iinfo(jnp.int32).max)
  shared = jnp.min(lax.select(together, theirs, most), axis=1)
  some = jnp.sum(together, axis=1, dtype=jnp.int32) > 1
  return Groups(leaders, sides, lax.select(some, shared, jnp.zeros_like(shared)))


def no_groups(batch: int) -> Groups:
  """Every row attends alone."""
  rows, zeros = lax.iota(jnp.int32, batch), jnp.zeros((batch,), jnp.int32)
  return Groups(rows, zeros, zeros)


def make_line(
  tokens: jax.Array,
  groups: Groups,
  *,
  width: int,
  tile: tiles.Tile,
  blocks: int,
  most_parts: int,
) -> WorkLine:
  """The line of rows with so many tokens.

  Args:
    tokens: int32 [B].
    groups: of the rows.
    width: most rows of a group; with 1 there are no items for groups.
    tile: what is read at a time.
    blocks: thread blocks.
    most_parts: that an item may have, see `tiles.share`.
  """
  batch = len(tokens)
  rows = lax.iota(jnp.int32, batch)
  first_tiles = lax.div(groups.shared_tokens, jnp.int32(tile.tokens))
  members = jnp.broadcast_to(rows[:, None], (batch, width))
  if width > 1:
    leads = (groups.leaders == rows) & (groups.shared_tokens > 0)
    led = lax.select(leads, groups.shared_tokens, jnp.zeros_like(tokens))
    tokens = jnp.concatenate([tokens, led])
    first_tiles = jnp.concatenate([first_tiles, jnp.zeros_like(first_tiles)])
    members = jnp.concatenate([members, _members(groups, width)])
  counts = lax.max(tile.count(tokens) - first_tiles, jnp.int32(0))
  spans = lax.select(counts > 0, counts + _ITEM_TILES, counts)
  square = len(spans), len(spans)
  items, others = (lax.broadcasted_iota(jnp.int32, square, axis) for axis in (0, 1))
  up_to = lax.select(others <= items, jnp.broadcast_to(spans, square), jnp.zeros_like(items))
  stops = jnp.sum(up_to, axis=1, dtype=jnp.int32)
  starts = stops - counts
  share = tiles.share(stops[-1], jnp.max(counts), blocks, most_parts)
  mine = lax.iota(jnp.int32, blocks)[:, None] * share
  parts = lax.div(stops - 1, share) - lax.div(starts, share) + 1
  return WorkLine(
    starts=starts,
    first_tiles=first_tiles,
    tokens=tokens,
    members=members,
    parts=lax.select(counts > 0, parts, jnp.zeros_like(parts)),
    first_items=jnp.sum(stops[None] <= mine, axis=1, dtype=jnp.int32),
    end_items=jnp.sum(starts[None] < mine + share, axis=1, dtype=jnp.int32),
    share=share[None],
  )


def _members(groups: Groups, width: int) -> jax.Array:
  """int32 [B, width]: the rows that each row leads, itself where there are fewer."""
  batch = len(groups.leaders)
  shape = batch, width, batch
  leader, side, row = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
  own = (groups.leaders == leader) & (groups.sides == side)
  found = jnp.max(lax.select(own, row, jnp.full_like(row, -1)), axis=2)
  return lax.select(found < 0, leader[..., 0], found)
