import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jax import config
from strata_jax.executors import buckets


@given(count=st.integers(0, 5000), overhead=st.integers(0, 200))
def test_pieces_cover_the_count_exactly(count, overhead):
  sizes = (32, 128, 512)
  pieces = buckets.cut(count, sizes, overhead)
  assert sum(valid for valid, _ in pieces) == count
  assert all(0 < valid <= bucket and bucket in sizes for valid, bucket in pieces)
  assert all(valid == bucket for valid, bucket in pieces[:-1])  # only the last is padded
  if count:  # never worse than the plainest cut
    cost = sum(bucket + overhead for _, bucket in pieces)
    plain = -(-count // 512) * (512 + overhead)
    assert cost <= plain


def test_the_overhead_decides_between_padding_and_more_pieces():
  sizes = (32, 128, 512)
  assert buckets.cut(300, sizes, 0) == ((128, 128), (128, 128), (32, 32), (12, 32))
  assert buckets.cut(300, sizes, 1000) == ((300, 512),)
  assert buckets.cut(0, sizes, 0) == ()


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("running", [1, 8, 64])
def test_a_run_has_at_most_about_24_programs(page_size, running):
  made = buckets.make_buckets(
    config.MODELS["smollm2_135m"].page_layout(page_size),
    config.ServingConfig(running_requests=running),
    device_pages=16384 // page_size,
    context_tokens=8192,
  )
  assert made.programs <= 28
  assert running == 64 or made.programs <= 24
  assert made.decode_requests == (1,) + {1: (), 8: (8,), 64: (16, 64)}[running]
  assert made.table_pages == 8192 // page_size


def test_small_pools_bound_the_shapes():
  made = buckets.make_buckets(
    config.MODELS["tiny"].page_layout(4),
    config.ServingConfig(running_requests=2, step_tokens=64),
    device_pages=5,
    context_tokens=512,
  )
  assert made.table_pages == 5
  assert made.chunk_tokens == (20,)
  assert made.transfer_pages[-1] == 5


def test_ladder():
  assert buckets.ladder(32, 512, 4) == (32, 128, 512)
  assert buckets.ladder(32, 20, 4) == (20,)
  assert buckets.ladder(1, 64, 4) == (1, 4, 16, 64)


@pytest.mark.parametrize("factor", [1, 0, -2])
def test_a_factor_that_makes_no_smaller_sizes_is_refused(factor):
  with pytest.raises(ValueError, match=f"factor between sizes: expected .* got {factor}"):
    make_small(28, row_factor=factor)


@given(st.integers(1, 300), st.integers(2, 20), st.integers(1, 40))
def test_every_number_of_running_requests_has_a_decode_batch(running, factor, least):
  sizes = make_small(running, row_factor=factor, least_decodes=least).decode_requests
  assert sizes[0] == least
  assert buckets.smallest_bucket(running, sizes) < max(running, least) + 8


def test_a_count_beyond_the_largest_bucket_is_refused():
  assert buckets.smallest_bucket(33, (32, 128)) == 128
  with pytest.raises(ValueError, match="expected at most 128, got 129"):
    buckets.smallest_bucket(129, (32, 128))


@pytest.mark.parametrize("sizes", [(), (4, 2), (2, 2), (0, 4)])
def test_sizes_must_ascend(sizes):
  with pytest.raises(ValueError, match="chunk_tokens: expected ascending sizes"):
    buckets.Buckets(chunk_tokens=sizes, decode_requests=(1,), transfer_pages=(4,), table_pages=8)


@pytest.mark.parametrize(
  ("running", "factor", "sizes"),
  [
    (28, 4, (1, 8, 32)), (28, 2, (1, 8, 16, 32)), (24, 2, (1, 16, 24)), (9, 2, (1, 8, 16)),
    (8, 2, (1, 8)), (3, 2, (1, 3)), (1, 2, (1,)),
  ],
)  # fmt: skip
def test_rows_of_decode_batches(running, factor, sizes):
  made = make_small(running, row_factor=factor)
  assert made.decode_requests == sizes


def test_the_least_rows_of_decode_batches():
  assert make_small(28, least_decodes=8).decode_requests == (8, 32)
  assert make_small(3, least_decodes=8).decode_requests == (8,)
  assert make_small(9, least_decodes=8).decode_requests == (8, 16)


def test_rows_of_prefill_batches():
  assert make_small(28, prefill_rows=16).prefill_rows == (1, 4, 16)
  assert make_small(28, prefill_rows=16, row_factor=2).prefill_rows == (1, 2, 4, 8, 16)


def make_small(running, **options):
  return buckets.make_buckets(
    config.MODELS["tiny"].page_layout(4), config.ServingConfig(running_requests=running),
    device_pages=5, context_tokens=512, **options,
  )  # fmt: skip
