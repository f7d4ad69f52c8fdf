"""What the executor's batches are told: padded rows on the device, and how tokens are drawn."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from strata_jax.executors import buckets as buckets_lib
from strata_jax.executors import layer_stack, packed_rows, prefill_batches, protocol


class Inputs(NamedTuple):
  """A batch that can be computed."""

  batch: layer_stack.Batch
  draws: packed_rows.Draws
  request_ids: tuple[int | None, ...]  # of each row that is no padding; None: it gives no token


@dataclasses.dataclass(kw_only=True, slots=True)
class _Registered:
  sampling: protocol.SamplingParams
  outputs: int = 0  # tokens sampled so far: the index of the next draw


class BatchInputs:
  """Makes the inputs of batches; knows the requests and how many tokens of each were drawn."""

  def __init__(
    self, buckets: buckets_lib.Buckets, device: jax.Device, *, page_size: int, device_pages: int
  ) -> None:
    """Takes the shapes that batches are padded to, and the pool that page tables point into."""
    self.buckets = buckets
    self._device, self._page_size, self._device_pages = device, page_size, device_pages
    self._requests: dict[int, _Registered] = {}

  def register(self, request_id: int, sampling: protocol.SamplingParams) -> None:
    """Announces a request."""
    self._requests[request_id] = _Registered(sampling=sampling)

  def release(self, request_id: int) -> None:
    """Forgets a request."""
    self._requests.pop(request_id, None)

  def prefills(self, works: Sequence[protocol.PrefillWork]) -> list[Inputs]:
    """The batches of all prefills of a step, in the order in which they have to run.

    Raises:
      ValueError: a page table that is too short or too long, or a prefill without tokens.
    """
    packed = prefill_batches.pack(
      works, self.buckets, page_size=self._page_size, device_pages=self._device_pages
    )
    return [self._prefill(batch, works) for batch in packed]

  def go_with_decodes(self, prefills: Sequence[Inputs]) -> bool:
    """Whether decodes are computed in one pass with these."""
    return len(prefills) == 1 and prefills[0].batch.token_ids.size <= self.buckets.joint_tokens

  def decodes(self, works: Sequence[protocol.DecodeWork], decode_steps: int) -> Inputs:
    """The batch of the first of some decode steps; of all of them the draws are counted.

    Raises:
      ValueError: more decodes than the largest batch has, or a page table of the wrong length.
    """
    count = len(works)
    rows = self._rows(buckets_lib.smallest_bucket(count, self.buckets.decode_requests), 1)
    self._fill_table(rows, [(work.page_table, work.position + decode_steps) for work in works])
    rows.token_ids[:count, 0] = [work.token_id for work in works]
    rows.starts[:count] = [work.position for work in works]
    rows.lengths[:count] = 1
    request_ids = tuple([work.request_id for work in works])
    self._fill_draws(rows, request_ids, decode_steps)
    return Inputs(*rows.put(self._device), request_ids)

  def padding(self, rows: int, tokens: int) -> Inputs:
    """A batch of nothing but padding."""
    return Inputs(*self._rows(rows, tokens).put(self._device), ())

  def structs(self, rows: int, tokens: int) -> Inputs:
    """The shapes of such a batch, `jax.ShapeDtypeStruct` for each array."""
    found = packed_rows.structs(rows, tokens, self.buckets.table_pages, self._device)
    return Inputs(*found, ())

  def lower(self, rows: int, tokens: int) -> jax.stages.Lowered:
    """The program that puts such a batch on the device."""
    return packed_rows.lower(rows, tokens, self.buckets.table_pages, self._device)

  def _prefill(
    self, batch: prefill_batches.PackedBatch, works: Sequence[protocol.PrefillWork]
  ) -> Inputs:
    sizes = self.buckets.batch_rows(batch.padded_tokens)
    rows = self._rows(buckets_lib.smallest_bucket(len(batch.pieces), sizes), batch.padded_tokens)
    contexts = [
      (works[piece.work].page_table, works[piece.work].start + piece.offset + piece.tokens)
      for piece in batch.pieces
    ]
    self._fill_table(rows, contexts)
    rows.token_ids[:], rows.starts[:], rows.lengths[:] = prefill_batches.arrays(
      batch, works, len(rows.table)
    )
    request_ids = tuple(
      [
        works[piece.work].request_id if piece.is_last and works[piece.work].samples else None
        for piece in batch.pieces
      ]
    )
    self._fill_draws(rows, request_ids, 1)
    return Inputs(*rows.put(self._device), request_ids)

  def _rows(self, rows: int, tokens: int) -> packed_rows.PackedRows:
    return packed_rows.PackedRows(rows, tokens, self.buckets.table_pages)

  def _fill_draws(
    self, rows: packed_rows.PackedRows, request_ids: Sequence[int | None], outputs: int
  ) -> None:
    """Temperatures, seeds and first output indices; counts the `outputs` of each request."""
    for row, request_id in enumerate(request_ids):
      if request_id is None:
        continue
      request = self._requests[request_id]
      rows.temperatures[row] = request.sampling.temperature
      rows.seeds[row] = request.sampling.seed % 2**32
      rows.indices[row] = request.outputs
      request.outputs += outputs

  def _fill_table(
    self, rows: packed_rows.PackedRows, contexts: Sequence[tuple[np.ndarray, int]]
  ) -> None:
    """Page tables, each with the tokens that it must have room for."""
    padded = rows.table
    for row, (table, tokens) in enumerate(contexts):
      if tokens > len(table) * self._page_size or len(table) > padded.shape[1]:
        raise ValueError(
          f"page table: expected room for {tokens} tokens in at most {padded.shape[1]} pages, "
          f"got {len(table)} pages of {self._page_size}"
        )
      padded[row, : len(table)] = table
