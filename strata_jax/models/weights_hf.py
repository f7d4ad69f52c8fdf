"""Models as Hugging Face folders: `config.json` and safetensors files."""

import contextlib
import json
import pathlib
from typing import Any

import numpy as np

from strata_jax import config as config_lib
from strata_jax.models import build, errors, llama

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM")
_INDEX = "model.safetensors.index.json"


def read_config(folder: pathlib.Path, dtype: str | None = None) -> config_lib.ModelConfig:
  """The ModelConfig of `folder/config.json`; `dtype` None takes the one it names.

  Raises:
    WeightsError: no config, an architecture or a feature that is not supported, a missing field.
  """
  path = folder / "config.json"
  if not path.is_file():
    raise errors.WeightsError(f"{folder}: no config.json there")
  raw = _read_json(path)
  architecture = (raw.get("architectures") or [None])[0]
  if architecture not in _ARCHITECTURES:
    raise errors.WeightsError(
      f"{path}: architecture {architecture}: expected one of {', '.join(_ARCHITECTURES)}"
    )
  _refuse_other_features(path, raw, architecture)
  generation = folder / "generation_config.json"
  eos = raw.get("eos_token_id")
  if generation.is_file():
    eos = _read_json(generation).get("eos_token_id", eos)
  try:
    return config_lib.ModelConfig(
      name=folder.resolve().name,
      num_layers=raw["num_hidden_layers"],
      hidden_size=raw["hidden_size"],
      intermediate_size=raw["intermediate_size"],
      num_heads=raw["num_attention_heads"],
      kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
      head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
      vocab_size=raw["vocab_size"],
      context_tokens=raw["max_position_embeddings"],
      rope_theta=float(_rope(raw).get("rope_theta", raw.get("rope_theta", 10000.0))),
      rope_scaling=_rope_scaling(path, _rope(raw)),
      rms_norm_eps=raw["rms_norm_eps"],
      tie_embeddings=raw.get("tie_word_embeddings", False),
      qkv_bias=architecture == "Qwen2ForCausalLM",
      dtype=dtype or raw.get("torch_dtype") or raw.get("dtype") or "bfloat16",
      eos_token_ids=() if eos is None else tuple(eos if isinstance(eos, list) else [eos]),
    )
  except KeyError as error:
    raise errors.WeightsError(f"{path}: missing field {error.args[0]}") from error
  except ValueError as error:
    raise errors.WeightsError(f"{path}: {error}") from error


def read_params(folder: pathlib.Path, config: config_lib.ModelConfig) -> llama.Params:
  """Reads `model.safetensors` or the shards that `model.safetensors.index.json` names.

  Raises:
    WeightsError: a file or a tensor is missing, broken, or of another shape; no safetensors.
  """
  safetensors = errors.optional_package("safetensors", f"reading {folder}")
  files = _tensor_files(folder)
  with contextlib.ExitStack() as stack:
    opened: dict[str, tuple[Any, frozenset[str]]] = {}
    for file in sorted(set(files.values())):
      path = folder / file
      if not path.is_file():
        raise errors.WeightsError(f"{path}: no such file")
      try:
        shard = stack.enter_context(safetensors.safe_open(str(path), framework="numpy"))
      except Exception as error:  # the package's own error class is no public one
        raise errors.WeightsError(f"{path}: not a safetensors file: {error}") from error
      opened[file] = shard, frozenset(shard.keys())

    def get(name: str) -> np.ndarray:
      shard, names = opened[files[name]]
      if name not in names:
        raise KeyError(name)
      return shard.get_tensor(name)

    return build.build_params(config, get, str(folder))


def _tensor_files(folder: pathlib.Path) -> dict[str, str]:
  """Tensor name -> file name."""
  index = folder / _INDEX
  if index.is_file():
    return dict(_read_json(index).get("weight_map", {}))
  path = folder / "model.safetensors"
  if not path.is_file():
    raise errors.WeightsError(f"{folder}: neither model.safetensors nor {_INDEX} there")
  safetensors = errors.optional_package("safetensors", f"reading {folder}")
  try:
    with safetensors.safe_open(str(path), framework="numpy") as file:
      return dict.fromkeys(file.keys(), path.name)
  except Exception as error:  # the package's own error class is no public one
    raise errors.WeightsError(f"{path}: not a safetensors file: {error}") from error


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise errors.WeightsError(f"{path}: not JSON: {error}") from error
  if not isinstance(value, dict):
    raise errors.WeightsError(f"{path}: expected a JSON object, got {type(value).__name__}")
  return value


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
  """The rotary settings, in the older or the newer place."""
  return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _rope_scaling(path: pathlib.Path, rope: dict[str, Any]) -> config_lib.RopeScaling | None:
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind == "default":
    return None
  if kind != "llama3":
    raise errors.WeightsError(f"{path}: rope_type {kind}: expected default or llama3")
  return config_lib.RopeScaling(
    factor=rope["factor"],
    low_freq_factor=rope["low_freq_factor"],
    high_freq_factor=rope["high_freq_factor"],
    original_context_tokens=rope["original_max_position_embeddings"],
  )


def _refuse_other_features(path: pathlib.Path, raw: dict[str, Any], architecture: str) -> None:
  wanted: dict[str, Any] = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
  if architecture == "LlamaForCausalLM":
    wanted["attention_bias"] = False
  for field, value in wanted.items():
    if raw.get(field, value) != value:
      raise errors.WeightsError(f"{path}: {field}: expected {value!r}, got {raw[field]!r}")
