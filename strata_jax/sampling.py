"""From logits to tokens: greedy, or drawn from a stream that the batch cannot disturb."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}  # of the two best logits


class Sampled(NamedTuple):
  """One token a row."""

  token_ids: jax.Array  # int32 [B]
  gaps: jax.Array  # float32 [B], in units of logits; see `sample`

  def packed(self) -> jax.Array:
    """int32 [B, 2]: both in one array, so that they cross the link at once; see `unpack`."""
    bits = jax.lax.bitcast_convert_type(self.gaps, jnp.int32)
    return jnp.stack([self.token_ids, bits], axis=1)


def unpack(packed: np.ndarray) -> tuple[list[int], list[float]]:
  """Token ids and gaps of the rows that `Sampled.packed` brought to the host, int32 [B, 2]."""
  return packed[:, 0].tolist(), packed[:, 1].view(np.float32).tolist()


def sample(
  logits: jax.Array, temperatures: jax.Array, seeds: jax.Array, indices: jax.Array
) -> Sampled:
  """Takes the best token, or draws one.

  A row with temperature 0 takes the largest logit. Any other row takes the largest of
  `logits / temperature + gumbel noise`, which draws from softmax(logits / temperature) (the
  Gumbel-max trick); the noise of a row depends on (seed, index) alone. The gap is the distance of
  the best from the second best, times the temperature if that is not 0: a rounding difference in
  the logits smaller than half of it cannot change the token.

  Args:
    logits: float32 [B, vocab].
    temperatures: float32 [B], >= 0.
    seeds: uint32 [B], of the requests.
    indices: int32 [B], which output of its request each row is.
  """
  drawn = temperatures > 0
  scales = jnp.where(drawn, temperatures, 1.0)[:, None]
  # The noise costs more than the rest on a CPU, and most runs are greedy.
  scores = jax.lax.cond(
    jnp.any(drawn),
    lambda: logits / scales + jnp.where(drawn[:, None], _noise(seeds, indices, logits), 0.0),
    lambda: logits,
  )
  best, token_ids = jax.lax.top_k(scores, 2)
  return Sampled(token_ids[:, 0], (best[:, 0] - best[:, 1]) * scales[:, 0])


def _noise(seeds: jax.Array, indices: jax.Array, logits: jax.Array) -> jax.Array:
  def row(seed: jax.Array, index: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), index)
    return jax.random.gumbel(key, logits.shape[1:], logits.dtype)

  return jax.vmap(row)(seeds, indices)
