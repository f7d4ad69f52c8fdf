import dataclasses

import jax
import numpy as np

from strata_jax import config as config_lib
from strata_jax.models import build, random
from tests.models import numpy_llama

TINY = config_lib.MODELS["tiny"]


def test_same_seed_same_weights_another_seed_others():
  leaves = [jax.tree.leaves(random.random_params(TINY, seed)) for seed in (0, 0, 1)]
  for a, b in zip(leaves[0], leaves[1], strict=True):
    np.testing.assert_array_equal(a, b)
  assert any((a != b).any() for a, b in zip(leaves[0], leaves[2], strict=True))


def test_shapes_scales_and_dtype():
  config = dataclasses.replace(TINY, qkv_bias=True, tie_embeddings=False, dtype="bfloat16")
  params = random.random_params(config)
  for layer in params.layers:
    tensors = numpy_llama.tensors(config, layer)
    for field, (_, shape) in build.layer_shapes(config).items():
      array = tensors[field]
      assert array.shape == shape[::-1]
      assert array.dtype == "bfloat16"
  assert params.head.output is not params.embedding
  wide = dataclasses.replace(TINY, hidden_size=1024)
  drawn = numpy_llama.tensors(wide, random.random_params(wide).layers[0])
  np.testing.assert_allclose(np.std(drawn["wq"]), 1 / 32, rtol=0.05)


def test_all_matrices_differ():
  config = dataclasses.replace(TINY, num_heads=4, kv_heads=4)
  first, second = (
    numpy_llama.tensors(config, layer) for layer in random.random_params(config).layers
  )
  drawn = [first["wq"], first["wk"], first["wv"], second["wq"], first["wo"]]
  sums = {float(np.abs(array).sum()) for array in drawn}
  assert len(sums) == len(drawn)


def test_tied_embeddings_are_one_array():
  params = random.random_params(TINY)
  assert params.head.output is params.embedding
