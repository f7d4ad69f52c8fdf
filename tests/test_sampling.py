import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import sampling

_sample = jax.jit(sampling.sample)


def draw(logits, temperatures, seeds, indices):
  return _sample(
    jnp.asarray(logits, jnp.float32),
    jnp.asarray(temperatures, jnp.float32),
    jnp.asarray(seeds, jnp.uint32),
    jnp.asarray(indices, jnp.int32),
  )


def noise(rows, vocab=50):
  return np.random.default_rng(0).normal(size=(rows, vocab)).astype(np.float32)


def test_greedy_takes_the_best_and_gives_the_distance_to_the_second():
  logits = noise(3)
  got = draw(logits, [0, 0, 0], [1, 2, 3], [0, 0, 0])
  np.testing.assert_array_equal(got.token_ids, logits.argmax(axis=1))
  ordered = np.sort(logits, axis=1)
  np.testing.assert_allclose(got.gaps, ordered[:, -1] - ordered[:, -2], rtol=1e-6)


def test_a_greedy_row_beside_drawn_rows_stays_greedy():
  logits = noise(3)
  got = draw(logits, [2.0, 0, 2.0], [1, 2, 3], [0, 0, 0])
  assert got.token_ids[1] == logits[1].argmax()


def test_a_draw_depends_on_seed_and_index_alone():
  logits = np.tile(noise(1), (4, 1))
  alone = [int(draw(logits[:1], [1.5], [7], [i]).token_ids[0]) for i in range(8)]
  assert len(set(alone)) > 1  # the index matters
  for i, token in enumerate(alone):  # another place, other neighbours
    assert int(draw(logits, [0, 1.5, 9.0, 1.5], [1, 7, 7, 8], [i, i, i, i]).token_ids[1]) == token
  others = [int(draw(logits[:1], [1.5], [8], [i]).token_ids[0]) for i in range(8)]
  assert others != alone  # the seed matters


def test_draws_follow_the_softmax():
  logits = np.tile(np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32)), (4000, 1))
  got = draw(logits, np.ones(4000), np.zeros(4000), np.arange(4000)).token_ids
  shares = np.bincount(got, minlength=4) / 4000
  np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=0.03)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_change_below_half_the_gap_never_changes_the_token(temperature):
  logits = noise(64)
  arguments = (np.full(64, temperature), np.arange(64), np.zeros(64))
  got = draw(logits, *arguments)
  error = np.random.default_rng(1).uniform(-0.499, 0.499, logits.shape) * got.gaps[:, None]
  again = draw(logits + error, *arguments)
  np.testing.assert_array_equal(again.token_ids, got.token_ids)
