"""Padded shapes: which sizes are compiled, and how work is cut into them."""

import bisect
import dataclasses

from strata_jax import config as config_lib
from strata_jax import validation
from strata_jax.tiers import layout

_TRANSFER_TOKENS = 1024  # moved by one call at most
_TRANSFER_OVERHEAD_PAGES = 4  # what one more call costs
_ROWS = 8  # of decode batches: a GPU pads the rows of products to a multiple of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
  """The sizes that programs are compiled for, each ascending."""

  chunk_tokens: tuple[int, ...]  # padded tokens of one piece of a prefill
  decode_requests: tuple[int, ...]  # padded rows of a decode batch
  transfer_pages: tuple[int, ...]  # padded length of the page lists of loads and backups
  table_pages: int  # width of every page table: the longest context
  prefill_rows: tuple[int, ...] = (1,)  # padded rows of a prefill batch, as its tokens allow
  piece_overhead_tokens: int = 64  # what one more piece costs, in tokens of compute
  joint_tokens: int = 0  # padded tokens of a prefill batch that decodes go along with, at most

  def __post_init__(self) -> None:
    for field in ("chunk_tokens", "decode_requests", "transfer_pages", "prefill_rows"):
      sizes = getattr(self, field)
      if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        validation.fail(self, field, "ascending sizes >= 1", sizes)
    if self.prefill_rows[0] != 1:
      validation.fail(self, "prefill_rows", "1 as the smallest", self.prefill_rows)
    validation.check_int(self, "table_pages", minimum=1)
    validation.check_int(self, "piece_overhead_tokens", minimum=0)
    validation.check_int(self, "joint_tokens", minimum=0)

  def chunk_pieces(self, tokens: int) -> tuple[tuple[int, int], ...]:
    """The pieces (valid, padded) that a prefill of `tokens` is computed in."""
    return cut(tokens, self.chunk_tokens, self.piece_overhead_tokens)

  def transfer_pieces(self, pages: int) -> tuple[tuple[int, int], ...]:
    """The pieces (valid, padded) that a list of `pages` is moved in."""
    return cut(pages, self.transfer_pages, _TRANSFER_OVERHEAD_PAGES)

  def batch_rows(self, padded_tokens: int) -> tuple[int, ...]:
    """The sizes of a prefill batch: no more tokens in all than in the largest piece."""
    largest = self.chunk_tokens[-1]
    return tuple(rows for rows in self.prefill_rows if rows == 1 or rows * padded_tokens <= largest)

  @property
  def shapes(self) -> tuple[tuple[int, int], ...]:
    """(rows, padded tokens) of all compute: batches of prefill pieces, and decode batches."""
    chunks = [(rows, tokens) for tokens in self.chunk_tokens for rows in self.batch_rows(tokens)]
    return tuple(dict.fromkeys(chunks + [(rows, 1) for rows in self.decode_requests]))

  @property
  def joint_shapes(self) -> tuple[tuple[int, int, int], ...]:
    """(rows, padded tokens) of prefill batches and the rows of decode batches that join them."""
    return tuple(
      (rows, tokens, decodes)
      for tokens in self.chunk_tokens
      for rows in self.batch_rows(tokens)
      for decodes in self.decode_requests
      if rows * tokens <= self.joint_tokens
    )

  @property
  def programs(self) -> int:
    """Programs of a run: embed, layer, head for a shape; load, backup for a list; a marker."""
    return 3 * len(self.shapes) + len(self.joint_shapes) + 2 * len(self.transfer_pages) + 1


def make_buckets(
  page_layout: layout.PageLayout,
  serving: config_lib.ServingConfig,
  *,
  device_pages: int,
  context_tokens: int,
  piece_tokens: int = 512,
  prefill_rows: int = 1,
  row_factor: int = 4,
  least_decodes: int = 1,
  joint_tokens: int = 0,
) -> Buckets:
  """Few buckets for a run, each a factor of 4 (or what is said) below the next.

  Args:
    page_layout: of both pools.
    serving: its step budget and its number of running requests bound the shapes.
    device_pages: of the device pool.
    context_tokens: the longest prompt + output.
    piece_tokens: the largest piece that a prefill is cut into.
    prefill_rows: pieces of different prefills that are computed together at most.
    row_factor: between the numbers of rows of batches, prefills and decodes.
    least_decodes: rows of the smallest decode batch.
    joint_tokens: padded tokens of a prefill batch that decodes go along with, at most.
  """
  context_pages = min(-(-context_tokens // page_layout.page_size), device_pages)
  chunk = min(piece_tokens, serving.step_tokens, context_pages * page_layout.page_size)
  # Longer lists are cut into pieces, so that the largest need not hold a whole context.
  transfer = min(max(_TRANSFER_TOKENS // page_layout.page_size, 4), device_pages)
  return Buckets(
    chunk_tokens=ladder(32, chunk, 4),
    decode_requests=_decode_rows(serving.running_requests, row_factor, least_decodes),
    transfer_pages=ladder(-(-transfer // 4), transfer, 4),
    table_pages=context_pages,
    prefill_rows=_from_one(ladder(1, min(prefill_rows, serving.batch_requests), row_factor)),
    joint_tokens=joint_tokens,
  )


def _decode_rows(most: int, factor: int, least: int) -> tuple[int, ...]:
  up = lambda rows: -(-rows // _ROWS) * _ROWS
  sizes = (most,) if most <= _ROWS else tuple(map(up, ladder(_ROWS, up(most), factor)))
  return tuple(sorted({least, *(max(size, least) for size in sizes)}))


def _from_one(sizes: tuple[int, ...]) -> tuple[int, ...]:
  return tuple(sorted({1, *sizes}))


def ladder(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
  """Sizes up to `largest`, each `factor` below the next, none under `smallest` but the last.

  Raises:
    ValueError: a factor below 2.
  """
  if factor < 2:
    raise ValueError(f"factor between sizes: expected an integer >= 2, got {factor}")
  sizes = [largest]
  while sizes[-1] // factor >= smallest:
    sizes.append(sizes[-1] // factor)
  return tuple(reversed(sizes))


def smallest_bucket(count: int, sizes: tuple[int, ...]) -> int:
  """The smallest size that holds `count`.

  Raises:
    ValueError: none does.
  """
  index = bisect.bisect_left(sizes, count)
  if index == len(sizes):
    raise ValueError(f"expected at most {sizes[-1]}, got {count}")
  return sizes[index]


def cut(count: int, sizes: tuple[int, ...], overhead: int) -> tuple[tuple[int, int], ...]:
  """Cuts `count` into pieces (valid, bucket) whose buckets and overheads sum up to little.

  Whole largest buckets first; of the rest, each step takes either one bucket that holds all of it
  or the largest full bucket below, whichever is cheaper.
  """
  largest = sizes[-1]
  pieces = [(largest, largest)] * (count // largest)
  rest = count % largest
  return tuple(pieces) + (_cut_rest(rest, sizes, overhead)[1] if rest else ())


def _cut_rest(
  rest: int, sizes: tuple[int, ...], overhead: int
) -> tuple[int, tuple[tuple[int, int], ...]]:
  whole = smallest_bucket(rest, sizes)
  best = whole + overhead, ((rest, whole),)
  below = bisect.bisect_right(sizes, rest) - 1
  if below >= 0 and sizes[below] < rest:
    size = sizes[below]
    cost, pieces = _cut_rest(rest - size, sizes, overhead)
    if cost + size + overhead < best[0]:
      best = cost + size + overhead, ((size, size), *pieces)
  return best
