import jax.numpy as jnp
import numpy as np

from strata_jax.attention import merge


def partial(scores: np.ndarray, values: np.ndarray) -> merge.Partial:
  weights = np.exp(scores - scores.max())
  out = weights @ values / weights.sum()
  return merge.Partial(jnp.asarray(out), jnp.asarray(scores.max() + np.log(weights.sum())))


def test_two_parts_make_the_whole():
  rng = np.random.default_rng(0)
  scores, values = rng.normal(size=9).astype(np.float32) * 20, rng.normal(size=(9, 4))
  whole = partial(scores, values)
  merged = merge.merge(partial(scores[:3], values[:3]), partial(scores[3:], values[3:]))
  np.testing.assert_allclose(merged.out, whole.out, atol=1e-6)
  np.testing.assert_allclose(merged.lse, whole.lse, rtol=1e-6)


def test_a_part_without_keys_has_no_weight():
  empty = merge.Partial(jnp.full((4,), 7.0), jnp.float32(merge.NOTHING))
  some = merge.Partial(jnp.arange(4.0), jnp.float32(-3.0))
  for merged in (merge.merge(empty, some), merge.merge(some, empty)):
    np.testing.assert_array_equal(merged.out, some.out)
    np.testing.assert_array_equal(merged.lse, some.lse)
  nothing = merge.merge(empty, empty)
  assert np.isfinite(np.asarray(nothing.out)).all()


def test_all_parts_at_once():
  rng = np.random.default_rng(1)
  scores, values = rng.normal(size=12).astype(np.float32) * 20, rng.normal(size=(12, 4))
  whole = partial(scores, values)
  parts = [partial(scores[i : i + 4], values[i : i + 4]) for i in (0, 4, 8)]
  parts.append(merge.Partial(jnp.full((4,), 9.0), jnp.float32(merge.NOTHING)))  # without keys
  merged = merge.merge_all(merge.Partial(*(jnp.stack(a) for a in zip(*parts, strict=True))), axis=0)
  np.testing.assert_allclose(merged.out, whole.out, atol=1e-6)
  np.testing.assert_allclose(merged.lse, whole.lse, rtol=1e-6)
