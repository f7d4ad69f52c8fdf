"""The XLA path against the plain reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax import attention
from strata_jax.attention import xla

_attend = jax.jit(attention.paged_attention, static_argnames="implementation")
_write = jax.jit(attention.write_kv)
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def case(
  seed, page_size, starts, lengths, chunk, heads=6, kv_heads=2, head_dim=16, dtype="float32"
):
  """A pool full of noise, distinct pages for every sequence, and the chunk written into it."""
  rng = np.random.default_rng(seed)
  batch = len(starts)
  width = max(-(-(s + n) // page_size) for s, n in zip(starts, lengths, strict=True)) + 2
  pages = batch * width + 3
  noise = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(jnp.dtype(dtype)))
  pool = noise(pages, 2, page_size, kv_heads, head_dim)
  table = jnp.asarray(rng.permutation(pages)[: batch * width].reshape(batch, width), jnp.int32)
  k, v = noise(batch, chunk, kv_heads, head_dim), noise(batch, chunk, kv_heads, head_dim)
  q = noise(batch, chunk, heads, head_dim)
  starts, lengths = jnp.asarray(starts, jnp.int32), jnp.asarray(lengths, jnp.int32)
  pool = _write(pool, k, v, table, starts, lengths)
  return q, k, v, pool, table, starts, lengths


def assert_same(arguments, tolerance):
  got = _attend(*arguments, implementation="xla")
  want = _attend(*arguments, implementation="reference")
  assert got.shape == arguments[0].shape
  assert got.dtype == arguments[0].dtype
  assert np.isfinite(np.asarray(got, np.float32)).all()
  for row, length in enumerate(np.asarray(arguments[-1])):
    np.testing.assert_allclose(
      np.asarray(got[row, :length], np.float32),
      np.asarray(want[row, :length], np.float32),
      atol=tolerance,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_chunks_behind_contexts_of_different_lengths(page_size, dtype):
  arguments = case(0, page_size, [0, 5, 130, 40], [20, 24, 1, 0], 24, dtype=dtype)
  assert_same(arguments, TOLERANCE[dtype])


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_decode_of_a_batch_with_a_padded_row(page_size):
  assert_same(case(1, page_size, [0, 1, 63, 64, 200], [1, 1, 1, 1, 0], 1), TOLERANCE["float32"])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (9, 3)])
def test_grouped_queries(heads, kv_heads):
  assert_same(case(2, 4, [10, 0], [8, 3], 8, heads=heads, kv_heads=kv_heads), 2e-5)


@pytest.mark.parametrize("chunk", [1, 6])
def test_a_chunk_that_is_written_afterwards(chunk):
  q, k, v, pool, *where = case(6, 4, [0, 9, 31], [min(chunk, n) for n in (1, 5, 6)], chunk)
  stale = _write(pool, jnp.full_like(k, jnp.nan), v, *where)
  got = attention.unwritten_attention(q, k, v, stale, *where, implementation="xla")
  want = _attend(q, k, v, pool, *where, implementation="reference")
  for row, length in enumerate(np.asarray(where[-1])):
    np.testing.assert_allclose(got[row, :length], want[row, :length], atol=2e-5)
  with pytest.raises(ValueError, match="expected one of xla, cudnn, hopper, got 'reference'"):
    attention.unwritten_attention(q, k, v, stale, *where, implementation="reference")


def test_contexts_longer_than_one_block():
  assert_same(case(3, 16, [xla._BLOCK_TOKENS * 2 + 7, 3], [5, 8], 8), 2e-5)
  assert_same(case(4, 1, [xla._BLOCK_TOKENS, xla._BLOCK_TOKENS - 1], [1, 1], 1), 2e-5)


def test_a_chunk_longer_than_one_block():
  length = xla._BLOCK_TOKENS + 30
  assert_same(case(8, 16, [9], [length], length + 5, heads=4), 2e-5)


def test_other_pages_do_not_matter():
  q, k, v, pool, table, starts, lengths = case(5, 4, [6, 13], [4, 2], 4)
  used = {
    int(table[row, page])
    for row in range(2)
    for page in range(-(-int(starts[row] + lengths[row]) // 4))
  }
  others = jnp.asarray([page for page in range(pool.shape[0]) if page not in used])
  changed = pool.at[others].set(jnp.nan)
  got = _attend(q, k, v, changed, table, starts, lengths, implementation="xla")
  want = _attend(q, k, v, pool, table, starts, lengths, implementation="xla")
  np.testing.assert_array_equal(got[0], want[0])
  np.testing.assert_array_equal(got[1, :2], want[1, :2])


@settings(max_examples=25, deadline=None)
@given(
  page_size=st.sampled_from([1, 8]),
  rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 8)), min_size=3, max_size=3),
)
def test_any_lengths(page_size, rows):
  starts, lengths = [row[0] for row in rows], [row[1] for row in rows]
  q, k, v, pool, _, s, n = case(6, page_size, starts, lengths, 8)
  width = 64  # one shape a page size: compiled once
  table = jnp.asarray(np.random.default_rng(7).permutation(3 * width).reshape(3, width), jnp.int32)
  pool = jax.random.normal(jax.random.key(0), (3 * width, *pool.shape[1:]))
  pool = _write(pool, k, v, table, s, n)
  assert_same((q, k, v, pool, table, s, n), 2e-5)
