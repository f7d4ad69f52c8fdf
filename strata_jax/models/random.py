"""Random weights: same config and seed, same model."""

import functools

import jax
import jax.numpy as jnp

from strata_jax import config as config_lib
from strata_jax.models import build, llama


def random_params(config: config_lib.ModelConfig, seed: int = 0) -> llama.Params:
  """Weights drawn on the default device, matrices normal with variance 1 / inputs, norms 1.

  Biases are drawn too, so that a model with them differs from one without.
  """
  shapes = {
    field: shape[::-1] if len(shape) == 2 else shape
    for field, (_, shape) in build.layer_shapes(config).items()
  }
  key = jax.random.key(seed)
  layers = tuple(
    build.layer_params(
      {
        field: _draw(
          jax.random.fold_in(jax.random.fold_in(key, layer), index), field, shape, config
        )
        for index, (field, shape) in enumerate(shapes.items())
      }
    )
    for layer in range(config.num_layers)
  )
  table = (config.vocab_size, config.hidden_size)
  embedding = _draw(jax.random.fold_in(key, config.num_layers), "embedding", table, config)
  output = embedding
  if not config.tie_embeddings:
    output = _draw(jax.random.fold_in(key, config.num_layers + 1), "output", table, config)
  norm = jnp.ones((config.hidden_size,), config.dtype)
  return llama.Params(
    embedding=embedding, layers=layers, head=llama.HeadParams(norm=norm, output=output)
  )


def _draw(
  key: jax.Array, field: str, shape: tuple[int, ...], config: config_lib.ModelConfig
) -> jax.Array:
  if field.endswith("norm"):
    return jnp.ones(shape, config.dtype)
  inputs = shape[-1] if field in ("embedding", "output") else shape[0]
  scale = 0.02 if field.startswith("b") else inputs**-0.5
  return _normal(key, shape, scale, config.dtype)


@functools.partial(jax.jit, static_argnums=(1, 3))
def _normal(key: jax.Array, shape: tuple[int, ...], scale: float, dtype: str) -> jax.Array:
  # The scale is applied in float32, and one program draws and rounds: no float32 copy remains.
  return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)
