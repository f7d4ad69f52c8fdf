import dataclasses
import json

import jax
import numpy as np
import pytest

from strata_jax import config as config_lib
from strata_jax.models import errors, random, weights_hf
from tests.models import hf_folder

TINY = config_lib.MODELS["tiny"]
QWEN = dataclasses.replace(TINY, qkv_bias=True, tie_embeddings=False, dtype="bfloat16")


def assert_equal_params(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("model", [TINY, QWEN], ids=["llama", "qwen"])
def test_reads_back_what_was_written(tmp_path, model, shards):
  params = random.random_params(model, seed=5)
  hf_folder.write(tmp_path, model, hf_folder.named_tensors(model, params), shards=shards)
  config = weights_hf.read_config(tmp_path)
  assert config == dataclasses.replace(model, name=tmp_path.name, eos_token_ids=(2,))
  assert_equal_params(weights_hf.read_params(tmp_path, config), params)


def test_another_dtype_is_rounded_once(tmp_path):
  params = random.random_params(TINY)
  hf_folder.write(tmp_path, TINY, hf_folder.named_tensors(TINY, params))
  config = weights_hf.read_config(tmp_path, "bfloat16")
  got = weights_hf.read_params(tmp_path, config)
  assert_equal_params(got, jax.tree.map(lambda x: x.astype("bfloat16"), params))


def read(tmp_path, **changes):
  raw = hf_folder.config_json(TINY, **changes)
  (tmp_path / "config.json").write_text(json.dumps(raw))
  return weights_hf.read_config(tmp_path)


def test_llama31_scaling_in_both_places(tmp_path):
  scaling = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
  }  # fmt: skip
  old = read(tmp_path, rope_scaling=scaling, rope_theta=500000.0)
  new = read(tmp_path, rope_parameters=scaling | {"rope_theta": 500000.0}, rope_theta=None)
  assert old == new
  assert old.rope_scaling == config_lib.MODELS["llama31_8b"].rope_scaling
  assert old.rope_theta == 500000.0


def test_fields_that_may_be_absent(tmp_path):
  config = read(tmp_path, head_dim=None, num_key_value_heads=None, eos_token_id=[5, 6])
  assert config.head_dim == TINY.hidden_size // TINY.num_heads
  assert config.kv_heads == TINY.num_heads
  assert config.eos_token_ids == (5, 6)
  (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7]}')
  assert read(tmp_path).eos_token_ids == (7,)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM: expected one of"),
    ({"architectures": None}, "architecture None"),
    ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
    ({"attention_bias": True}, "attention_bias: expected False"),
    ({"vocab_size": None}, "missing field vocab_size"),
    ({"num_key_value_heads": 3}, "a multiple of kv_heads=3"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type yarn"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "missing field low_freq_factor"),
  ],
)
def test_configs_that_are_refused(tmp_path, changes, message):
  with pytest.raises(errors.WeightsError, match=message) as error:
    read(tmp_path, **changes)
  assert "\n" not in str(error.value)
  assert str(tmp_path) in str(error.value)


def test_broken_weights(tmp_path):
  params = random.random_params(TINY)
  whole = hf_folder.named_tensors(TINY, params)
  name = "model.layers.1.mlp.up_proj.weight"

  def refused(message):
    with pytest.raises(errors.WeightsError, match=message) as error:
      weights_hf.read_params(tmp_path, weights_hf.read_config(tmp_path))
    assert "\n" not in str(error.value)

  hf_folder.write(tmp_path, TINY, {k: v for k, v in whole.items() if k != name})
  refused(f"missing tensor {name}")
  hf_folder.write(tmp_path, TINY, whole | {name: whole[name][:, :5].copy()})
  refused(rf"{name}: expected shape \(64, 32\), got \(64, 5\)")
  (tmp_path / "model.safetensors").write_bytes(b"no tensors")
  refused("not a safetensors file")
  (tmp_path / "model.safetensors").unlink()
  refused("neither model.safetensors nor")
  hf_folder.write(tmp_path, TINY, whole, shards=2)
  (tmp_path / "model-00002-of-00002.safetensors").unlink()
  refused("model-00002-of-00002.safetensors: no such file")
  (tmp_path / "config.json").write_text("{")
  refused("config.json: not JSON")
  (tmp_path / "config.json").write_text("[]")
  refused("expected a JSON object, got list")
  (tmp_path / "config.json").unlink()
  refused("no config.json there")
