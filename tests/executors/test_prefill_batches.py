"""Prefills of a step in batches: what may stand together, and that it computes the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.executors import buckets, prefill_batches, protocol
from strata_jax.tiers import device as device_tier
from tests.executors import test_overlap
from tests.executors.test_overlap import PAGE_SIZE

BUCKETS = buckets.Buckets(
  chunk_tokens=(16, 64, 256), decode_requests=(1,), transfer_pages=(8,), table_pages=64,
  prefill_rows=(1, 4), piece_overhead_tokens=0,
)  # fmt: skip


def work(request_id, table, start, tokens):
  return protocol.PrefillWork(
    request_id=request_id, token_ids=np.arange(tokens, dtype=np.int32), start=start,
    page_table=np.asarray(table, np.int32), samples=True,
  )  # fmt: skip


def pack(works):
  return prefill_batches.pack(works, BUCKETS, page_size=PAGE_SIZE, device_pages=200)


def test_rows_share_a_batch_up_to_its_size():
  works = [work(i, range(10 * i, 10 * i + 10), 8, 12) for i in range(6)]
  assert [[piece.work for piece in batch.pieces] for batch in pack(works)] == [[0, 1, 2, 3], [4, 5]]
  assert BUCKETS.batch_rows(256) == (1,)  # one piece is a whole batch's compute
  assert (4, 64) in BUCKETS.shapes
  assert (4, 256) not in BUCKETS.shapes


def test_who_reads_what_another_one_writes_comes_later():
  shared = list(range(5))
  first = work(0, shared, 0, 16)  # writes pages 0 to 3
  reader = work(1, [*shared[:4], 9, 10], 16, 8)
  other = work(2, range(20, 30), 16, 8)
  batches = pack([first, reader, other])
  assert [[piece.work for piece in batch.pieces] for batch in batches] == [[0, 2], [1]]


def test_pieces_of_one_prefill_follow_each_other():
  batches = pack([work(0, range(40), 0, 150), work(1, range(50, 60), 0, 10)])
  assert [(b.padded_tokens, [p[:3] for p in b.pieces]) for b in batches] == [
    (64, [(0, 0, 64)]), (64, [(0, 64, 64)]), (16, [(0, 128, 16), (1, 0, 10)]), (16, [(0, 144, 6)]),
  ]  # fmt: skip
  assert [p.is_last for b in batches for p in b.pieces] == [False, False, False, True, True]
  ids, starts, lengths = prefill_batches.arrays(
    batches[2], [work(0, [], 0, 150), work(1, [], 0, 10)], 4
  )
  np.testing.assert_array_equal(ids[0], np.arange(128, 144))
  np.testing.assert_array_equal(ids[1], [*range(10), *[0] * 6])
  assert starts.tolist() == [128, 0, 0, 0]
  assert lengths.tolist() == [16, 10, 0, 0]


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_every_token_once_and_every_context_before_its_reader(data):
  works = []
  pages: list[int] = []  # written by works so far
  for request_id in range(data.draw(st.integers(1, 8))):
    shared = data.draw(st.integers(0, len(pages)))
    tokens = data.draw(st.integers(1, 100))
    own = list(range(len(pages), len(pages) + -(-tokens // PAGE_SIZE)))
    works.append(work(request_id, pages[:shared] + own, shared * PAGE_SIZE, tokens))
    pages += own
  batches = prefill_batches.pack(works, BUCKETS, page_size=PAGE_SIZE, device_pages=len(pages))
  written: set[int] = set()
  seen = dict.fromkeys(range(len(works)), 0)
  ever = set(pages)
  for batch in batches:
    assert 1 <= len(batch.pieces) <= BUCKETS.batch_rows(batch.padded_tokens)[-1]
    now = set()
    for piece in batch.pieces:
      one = works[piece.work]
      assert seen[piece.work] == piece.offset
      assert piece.tokens <= batch.padded_tokens
      start = one.start + piece.offset
      context = one.page_table[: -(-start // PAGE_SIZE)].tolist()
      assert set(context) & ever <= written  # nothing that is still to come, not even beside it
      seen[piece.work] += piece.tokens
      now |= set(
        one.page_table[start // PAGE_SIZE : -(-(start + piece.tokens) // PAGE_SIZE)].tolist()
      )
    written |= now
  assert [seen[i] for i in range(len(works))] == [len(w.token_ids) for w in works]


def test_no_tokens_are_refused():
  with pytest.raises(ValueError, match="request 7: expected tokens, got none"):
    pack([work(7, [], 0, 0)])


@pytest.mark.parametrize("overlap", ["layer", "whole"])
def test_batched_prefills_compute_what_single_ones_compute(overlap):
  got = []
  for rows in ((1,), (1, 4)):
    drive = test_overlap.make_driver(overlap, prefill_rows=rows, chunks=(16, 64))
    events, pool = test_overlap.warm_step(drive)
    got.append((events[-1].tokens, pool))
  assert got[0][0] == got[1][0]
  np.testing.assert_allclose(got[0][1], got[1][1], atol=1e-5)


@pytest.mark.slow
def test_batched_prefills_compile_nothing_after_the_warm_up():
  drive = test_overlap.make_driver("layer", context=132, prefill_rows=(1, 4), chunks=(16, 64))
  drive.executor.warmup()
  test_overlap.warm_step(drive)
  assert drive.executor.recompiles == 0


def test_pools_go_from_one_executor_to_another():
  first = test_overlap.make_driver("whole")
  kept = test_overlap.fill_host(first)
  before = device_tier.read_pages(first.executor.device_pool, np.arange(20))
  second = test_overlap.make_driver("layer", pools=first.executor.take_pools())
  np.testing.assert_array_equal(
    device_tier.read_pages(second.executor.device_pool, np.arange(20)), before
  )
  load = second.load_work(kept[2], np.arange(40, 40 + len(kept[2])))
  second.step(loads=(load,))
  np.testing.assert_array_equal(
    device_tier.read_pages(second.executor.device_pool, np.arange(40, 40 + len(kept[2]))),
    before[: len(kept[2])],
  )
  with pytest.raises(ValueError, match="pools: expected 3 device pools of shape"):
    test_overlap.make_driver("whole", pools=((), None))
