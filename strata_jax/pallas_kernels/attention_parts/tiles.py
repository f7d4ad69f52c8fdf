"""How the KV of a row is cut: the tile a thread block reads at a time, and who reads which tiles.

All is arithmetic on Python or traced integers, so that the kernel and its tests share it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

QUERY_ROWS = 64  # rows of a warpgroup's matrix product: heads of one row or several, and padding
_LARGEST_TILE = 256  # rows that one copy may have, and columns that one product may


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
  """KV that a thread block reads in one step; a row of it is one KV head of one token.

  Attributes:
    rows: tokens times KV heads, a multiple of 64.
    kv_heads: of the pool.
    page_rows: rows of a page; a multiple or a divisor of `rows`.
  """

  rows: int
  kv_heads: int
  page_rows: int

  @property
  def tokens(self) -> int:
    return self.rows // self.kv_heads

  @property
  def page_tokens(self) -> int:
    return self.page_rows // self.kv_heads

  @property
  def pages(self) -> int:
    """Pages that a tile has rows of."""
    return -(-self.rows // self.page_rows)

  @property
  def copy_rows(self) -> int:
    """Rows of a tile that lie in one page."""
    return min(self.rows, self.page_rows)

  @property
  def tiles_a_page(self) -> int:
    """1 if a tile is a page or several."""
    return -(-self.page_rows // self.rows)

  def place(self, index: jax.Array) -> tuple[jax.Array, jax.Array | int]:
    """Of a row's tile: the first of its pages in the row's table, and where in them it begins."""
    if self.tiles_a_page > 1:
      position = lax.div(index, jnp.int32(self.tiles_a_page))
      return position, lax.rem(index, jnp.int32(self.tiles_a_page)) * self.rows
    return index * self.pages, 0

  def count(self, tokens: jax.Array) -> jax.Array:
    """Tiles of a row with so many tokens."""
    return ceil_div(tokens, self.tokens)


def find_tile(kv_heads: int, page_size: int, tile_rows: int) -> Tile | None:
  """The largest tile of at most `tile_rows` rows, else the smallest there is, None without any.

  A tile has whole tokens, and whole pages or an equal part of one.
  """
  page_rows = page_size * kv_heads
  fits = [
    rows
    for rows in range(64, _LARGEST_TILE + 1, 64)
    if rows % kv_heads == 0 and (rows % page_rows == 0 or page_rows % rows == 0)
  ]
  if page_rows % 8 or not fits:
    return None
  rows = max((rows for rows in fits if rows <= tile_rows), default=fits[0])
  return Tile(rows=rows, kv_heads=kv_heads, page_rows=page_rows)


def padded_heads(heads: int) -> int:
  """Rows of a product that the heads of one row take: a copy has whole tiles of 8."""
  return -(-heads // 8) * 8


def group_width(heads: int) -> int:
  """Rows whose heads have room in one product."""
  return QUERY_ROWS // padded_heads(heads)


def most_parts(batch: int, blocks: int, part_factor: int) -> int:
  """Thread blocks that may share a row, the size of the buffer of partial results.

  With all rows valid `blocks / batch` share one. `part_factor` times as many keep the device full
  where only so small a part of the rows is valid.
  """
  return 1 + min(blocks, -(-part_factor * blocks // batch))


def share(total: jax.Array, longest: jax.Array, blocks: int, parts: int) -> jax.Array:
  """Tiles a thread block.

  The tiles of all rows stand in one line that is cut into equal shares, so that blocks are equally
  busy whatever the rows' lengths. A share is so large that no row is cut into more than `parts`:
  its first piece may be short.

  Args:
    total: tiles of all rows.
    longest: tiles of the longest row.
    blocks: thread blocks.
    parts: `most_parts`.
  """
  return lax.max(lax.max(ceil_div(total, blocks), ceil_div(longest, parts - 1)), jnp.int32(1))


def ceil_div(value: jax.Array, divisor: int) -> jax.Array:
  return lax.div(value + jnp.int32(divisor - 1), jnp.int32(divisor))
