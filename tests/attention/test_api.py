import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import attention


def arguments():
  q = jnp.ones((1, 2, 4, 8))
  kv = jnp.ones((1, 2, 2, 8))
  pool = jnp.zeros((5, 2, 3, 2, 8))
  return q, kv, kv, pool, jnp.asarray([[4, 1]], jnp.int32), jnp.int32([2]), jnp.int32([2])


def test_write_kv_touches_the_chunk_and_nothing_else():
  rng = np.random.default_rng(0)
  pool = rng.normal(size=(6, 2, 4, 2, 8)).astype(np.float32)
  k, v = rng.normal(size=(2, 2, 5, 2, 8)).astype(np.float32)
  table = np.array([[3, 0, 5], [1, 2, 4]], np.int32)
  starts, lengths = np.array([2, 7], np.int32), np.array([5, 0], np.int32)  # the second is padding
  got = attention.write_kv(*map(jnp.asarray, (pool, k, v, table, starts, lengths)))
  want = pool.copy()
  for token in range(5):
    page, offset = divmod(2 + token, 4)
    want[table[0, page], 0, offset] = k[0, token]
    want[table[0, page], 1, offset] = v[0, token]
  np.testing.assert_array_equal(got, want)


def test_write_kv_rounds_to_the_pool_dtype():
  pool = jnp.zeros((2, 2, 1, 1, 2), jnp.bfloat16)
  k = jnp.full((1, 1, 1, 2), 1.001)
  table = jnp.zeros((1, 1), jnp.int32)
  got = attention.write_kv(pool, k, k, table, jnp.int32([0]), jnp.int32([1]))
  assert got.dtype == jnp.bfloat16
  np.testing.assert_array_equal(got[0, 0, 0], k[0, 0].astype(jnp.bfloat16))


def test_an_unknown_implementation_is_refused():
  with pytest.raises(ValueError, match=r"expected one of .*, hopper, got 'flash'"):
    attention.paged_attention(*arguments(), implementation="flash")
