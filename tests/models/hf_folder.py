"""Writes a model as a Hugging Face folder, sharded or not, from parameters."""

import json

import numpy as np
import pytest

from strata_jax.models import build
from tests.models import numpy_llama


def config_json(config, **changes):
  raw = {
    "architectures": ["Qwen2ForCausalLM" if config.qkv_bias else "LlamaForCausalLM"],
    "hidden_size": config.hidden_size,
    "intermediate_size": config.intermediate_size,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.kv_heads,
    "head_dim": config.head_dim,
    "vocab_size": config.vocab_size,
    "max_position_embeddings": config.context_tokens,
    "rms_norm_eps": config.rms_norm_eps,
    "rope_theta": config.rope_theta,
    "hidden_act": "silu",
    "tie_word_embeddings": config.tie_embeddings,
    "torch_dtype": config.dtype,
    "eos_token_id": 2,
  }
  return {k: v for k, v in (raw | changes).items() if v is not None}


def named_tensors(config, params):
  """Hugging Face name -> numpy array, matrices as (out, in)."""
  tensors = {
    "model.embed_tokens.weight": np.asarray(params.embedding),
    "model.norm.weight": np.asarray(params.head.norm),
  }
  if not config.tie_embeddings:
    tensors["lm_head.weight"] = np.asarray(params.head.output)
  for index, layer in enumerate(params.layers):
    fields = numpy_llama.tensors(config, layer)
    for field, (name, _) in build.layer_shapes(config).items():
      array = fields[field]
      tensors[f"model.layers.{index}.{name}"] = np.ascontiguousarray(array.T)
  return tensors


def write(folder, config, tensors, *, shards=1, **changes):
  save = pytest.importorskip("safetensors.numpy").save_file
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text(json.dumps(config_json(config, **changes)))
  if shards == 1:
    save(tensors, folder / "model.safetensors")
    return
  weight_map = {}
  for shard in range(shards):
    file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
    part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
    save(part, folder / file)
    weight_map |= dict.fromkeys(part, file)
  index = {"metadata": {}, "weight_map": weight_map}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
