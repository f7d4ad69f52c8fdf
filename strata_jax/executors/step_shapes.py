"""What an executor with padded shapes computes for the prefills of a step, for its costs.

The packing of `prefill_batches` by sizes alone: pieces of equal padded size share a batch, the
pieces of one chunk stand in batches that follow each other. (There a piece also comes after those
that write its context; the costs do not know of that.)
"""

from collections.abc import Sequence
from typing import NamedTuple

from strata_jax.executors.buckets import Buckets, smallest_bucket


class Piece(NamedTuple):
  """A part of a chunk."""

  tokens: int
  padded: int
  before: int  # tokens of its context before it


class Shapes(NamedTuple):
  """Padded work of a prefill pass."""

  batches: list[int]  # padded tokens of each, padded rows included
  pieces: list[Piece]


def shapes_of(chunks: Sequence[tuple[int, int]], buckets: Buckets) -> Shapes:
  """The shapes that chunks (new tokens, tokens before) are computed in."""
  open_batches: list[tuple[int, int]] = []  # padded tokens of a row, rows
  pieces: list[Piece] = []
  for new, before in chunks:
    first = 0
    for tokens, padded in buckets.chunk_pieces(new):
      most = buckets.batch_rows(padded)[-1]
      for at in range(first, len(open_batches)):
        size, rows = open_batches[at]
        if size == padded and rows < most:
          open_batches[at] = (padded, rows + 1)
          break
      else:
        at = len(open_batches)
        open_batches.append((padded, 1))
      first = at + 1
      pieces.append(Piece(tokens, padded, before))
      before += tokens
  batches = [
    padded * smallest_bucket(rows, buckets.batch_rows(padded)) for padded, rows in open_batches
  ]
  return Shapes(batches, pieces)


def can_join(chunks: Sequence[tuple[int, int]], buckets: Buckets) -> bool:
  """Whether decodes of their step are computed in one pass with these chunks, without loads."""
  if not buckets.joint_tokens:
    return False
  first, *others = shapes_of(chunks, buckets).batches
  return not others and first <= buckets.joint_tokens
