"""The prefills of a step, cut into pieces, and the pieces packed into batches.

Rows of a batch are computed by one program: it reads the weights once for all of them. A piece
whose context another piece of the step writes stands in a later batch than that one.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from strata_jax.executors import buckets as buckets_lib
from strata_jax.executors import protocol


class Piece(NamedTuple):
  """A part of one prefill: a row of a batch."""

  work: int  # index into the prefills of the step
  offset: int  # of its first token in the work's `token_ids`
  tokens: int
  is_last: bool  # of its work


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
  """Rows that are padded to one size."""

  padded_tokens: int
  pieces: list[Piece]


def pack(
  works: Sequence[protocol.PrefillWork],
  buckets: buckets_lib.Buckets,
  *,
  page_size: int,
  device_pages: int,
) -> list[PackedBatch]:
  """Batches in the order in which they have to run.

  Args:
    works: of one step; a later one may attend to what an earlier one writes.
    buckets: the sizes of pieces and batches.
    page_size: tokens of a page.
    device_pages: of the pool that the page tables point into.

  Raises:
    ValueError: a prefill without tokens.
  """
  batches: list[PackedBatch] = []
  writer = np.full(device_pages, -1, np.int32)  # by device slot: the batch that writes it
  for index, work in enumerate(works):
    if not len(work.token_ids):
      raise ValueError(f"prefill of request {work.request_id}: expected tokens, got none")
    offset = 0
    for tokens, padded in buckets.chunk_pieces(len(work.token_ids)):
      start = work.start + offset
      context = work.page_table[: -(-start // page_size)]
      first = 1 + (int(writer[context].max()) if batches and len(context) else -1)
      at = _place(batches, first, padded, buckets)
      is_last = offset + tokens == len(work.token_ids)
      batches[at].pieces.append(Piece(index, offset, tokens, is_last))
      own = slice(start // page_size, -(-(start + tokens) // page_size))
      writer[work.page_table[own]] = at
      offset += tokens
  return batches


def arrays(
  batch: PackedBatch, works: Sequence[protocol.PrefillWork], rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Token ids [rows, T], tokens before the pieces [rows], and their lengths [rows], all int32."""
  ids = np.zeros((rows, batch.padded_tokens), np.int32)
  starts, lengths = np.zeros((2, rows), np.int32)
  for row, piece in enumerate(batch.pieces):
    work = works[piece.work]
    ids[row, : piece.tokens] = work.token_ids[piece.offset : piece.offset + piece.tokens]
    starts[row], lengths[row] = work.start + piece.offset, piece.tokens
  return ids, starts, lengths


def _place(
  batches: list[PackedBatch], first: int, padded: int, buckets: buckets_lib.Buckets
) -> int:
  """The first batch from `first` on with room for a piece; a new one if there is none."""
  most = buckets.batch_rows(padded)[-1]
  for at in range(first, len(batches)):
    if batches[at].padded_tokens == padded and len(batches[at].pieces) < most:
      return at
  batches.append(PackedBatch(padded_tokens=padded, pieces=[]))
  return len(batches) - 1
