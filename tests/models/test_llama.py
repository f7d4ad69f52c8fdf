"""The model against an independent numpy forward pass and published numbers."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import config as config_lib
from strata_jax.models import llama, loader, random
from tests.models import numpy_llama, paged_forward
from tests.shared_data import shared_data

TINY = config_lib.MODELS["tiny"]
LLAMA31 = config_lib.MODELS["llama31_8b"].rope_scaling
VARIANTS = {
  "tied, grouped queries": TINY,
  "Qwen2.5: QKV biases, one KV head": dataclasses.replace(
    TINY, qkv_bias=True, rope_theta=1e6, kv_heads=1
  ),
  "Llama-3.1 frequencies, untied, wide heads, none shared": dataclasses.replace(
    TINY, rope_scaling=dataclasses.replace(LLAMA31, original_context_tokens=16),
    tie_embeddings=False, kv_heads=4, head_dim=24,
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_numpy_forward_pass(name):
  config = VARIANTS[name]
  params = random.random_params(config, seed=1)
  token_ids = np.random.default_rng(0).integers(0, config.vocab_size, 21)
  want = numpy_llama.forward(config, params, token_ids)[-1]
  got = paged_forward.prompt_logits(config, params, token_ids)
  np.testing.assert_allclose(got, want, atol=2e-4)


def test_the_frequency_scaling_changes_the_logits():
  """So that the test above can fail."""
  config = next(config for config in VARIANTS.values() if config.rope_scaling)
  params = random.random_params(config, seed=1)
  token_ids = list(range(21))
  want = numpy_llama.forward(config, params, token_ids)
  plain = numpy_llama.forward(dataclasses.replace(config, rope_scaling=None), params, token_ids)
  assert np.abs(want - plain)[-1].max() > 1e-2


@pytest.mark.parametrize("model", ["llama31_8b", "llama31_70b", "qwen25_14b_1m", "smollm2_135m"])
def test_rope_frequencies_of_the_presets(model):
  config = config_lib.MODELS[model]
  got = llama.scaled_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
  np.testing.assert_allclose(got, numpy_llama.frequencies(config), rtol=1e-12)


def test_rope_rotates_pairs_of_the_two_halves():
  x = np.random.default_rng(0).normal(size=(1, 3, 2, 8)).astype(np.float32)
  positions = jnp.asarray([[0, 1, 500]])
  got = np.asarray(llama.rotate(jnp.asarray(x), *llama.rope_tables(TINY, positions)))
  angles = np.array([0, 1, 500])[:, None] * 10000.0 ** (-np.arange(4) / 4)
  turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[None, :, None]
  np.testing.assert_allclose(got[..., :4], turned.real, atol=2e-4)
  np.testing.assert_allclose(got[..., 4:], turned.imag, atol=2e-4)


def test_bfloat16_stays_near_float32():
  config = dataclasses.replace(TINY, dtype="bfloat16")
  params = random.random_params(config, seed=1)
  assert {str(layer.wqkv.dtype) for layer in params.layers} == {"bfloat16"}
  token_ids = list(range(30))
  got = paged_forward.prompt_logits(config, params, token_ids)
  want = numpy_llama.forward(config, params, token_ids)[-1]
  assert got.dtype == np.float32
  np.testing.assert_allclose(got, want, atol=0.15)


def test_stories_logits():
  config, params, _ = loader.load_model(str(shared_data("stories260K/config.json").parent))
  cases = {c["name"]: c for c in json.loads(shared_data("stories260K/golden.json").read_text())}
  for name, splits in (("window_64", ()), ("fork_64", (32,)), ("prefix_64", (32,))):
    case = cases[name]
    got = paged_forward.prompt_logits(config, params, case["prompt_ids"], splits=splits)
    for token_id, logit in case["first_top5"]:
      assert got[token_id] == pytest.approx(logit, abs=1e-3)
    best = np.argsort(-got)[:5].tolist()
    assert best == [token_id for token_id, _ in case["first_top5"]]
