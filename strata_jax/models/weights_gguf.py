"""Models as GGUF files, dequantised exactly by the package `gguf`.

GGUF stores Q and K rows of the `llama` architecture for the rotation of adjacent pairs (2i, 2i+1);
they are put back into the rotate-half order of Hugging Face, head by head.
"""

import pathlib
from typing import Any

import numpy as np

from strata_jax import config as config_lib
from strata_jax.models import build, errors, llama

_ARCHITECTURES = ("llama", "qwen2")
_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_LAYER_NAMES = {
  "input_layernorm": "attn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}
_NAMES = {
  "model.embed_tokens.weight": "token_embd.weight",
  "model.norm.weight": "output_norm.weight",
  "lm_head.weight": "output.weight",
}
# Llama-3.x files store the scaled frequencies, not the formula; these are the released constants.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


class GgufFile:
  """An opened GGUF file: metadata as plain values, tensors by Hugging Face names."""

  def __init__(self, path: pathlib.Path) -> None:
    """Raises WeightsError: no such package, or not a GGUF file."""
    self.path = path
    self._gguf = errors.optional_package("gguf", f"reading {path}")
    try:
      reader = self._gguf.GGUFReader(str(path))
    except (ValueError, OSError, IndexError) as error:
      raise errors.WeightsError(f"{path}: not a GGUF file: {error}") from error
    self._fields = reader.fields
    self._tensors = {tensor.name: tensor for tensor in reader.tensors}

  def field(self, name: str, default: Any = None) -> Any:
    """One metadata value, or `default`."""
    return self._fields[name].contents() if name in self._fields else default

  def tokenizer_fields(self) -> dict[str, Any]:
    """The metadata of the tokenizer stored in the file."""
    return {
      name: field.contents()
      for name, field in self._fields.items()
      if name.startswith("tokenizer.")
    }

  def read_config(self, dtype: str | None = None) -> config_lib.ModelConfig:
    """The ModelConfig of the file; `dtype` None means float32, exact for every stored type.

    Raises:
      WeightsError: another architecture, a missing field, frequencies that are not Llama-3's.
    """
    arch = self.field("general.architecture")
    if arch not in _ARCHITECTURES:
      raise errors.WeightsError(
        f"{self.path}: architecture {arch}: expected one of {', '.join(_ARCHITECTURES)}"
      )

    def need(name: str) -> Any:
      value = self.field(f"{arch}.{name}")
      if value is None:
        raise errors.WeightsError(f"{self.path}: missing field {arch}.{name}")
      return value

    embedding = self._tensors.get("token_embd.weight")
    if embedding is None:
      raise errors.WeightsError(f"{self.path}: missing tensor token_embd.weight")
    heads, hidden = need("attention.head_count"), need("embedding_length")
    eos = self.field("tokenizer.ggml.eos_token_id")
    theta = float(self.field(f"{arch}.rope.freq_base", 10000.0))
    head_dim = self.field(f"{arch}.attention.key_length", hidden // heads)
    return config_lib.ModelConfig(
      name=self.path.stem,
      num_layers=need("block_count"),
      hidden_size=hidden,
      intermediate_size=need("feed_forward_length"),
      num_heads=heads,
      kv_heads=self.field(f"{arch}.attention.head_count_kv", heads),
      head_dim=head_dim,
      vocab_size=int(embedding.shape[1]),  # GGUF gives dimensions innermost first
      context_tokens=need("context_length"),
      rope_theta=theta,
      rope_scaling=self._rope_scaling(theta, head_dim),
      # Stored as float32: the shortest decimal that gives the same float32 is the one meant.
      rms_norm_eps=float(str(np.float32(need("attention.layer_norm_rms_epsilon")))),
      tie_embeddings="output.weight" not in self._tensors,
      qkv_bias="blk.0.attn_q.bias" in self._tensors,
      dtype=dtype or "float32",
      eos_token_ids=() if eos is None else (int(eos),),
    )

  def read_params(self, config: config_lib.ModelConfig) -> llama.Params:
    """Raises WeightsError: a tensor is missing, of another shape, or of an unknown type."""
    heads = {"attn_q": config.num_heads, "attn_k": config.kv_heads}
    adjacent = self.field("general.architecture") == "llama"

    def get(name: str) -> np.ndarray:
      stored = _gguf_name(name)
      array = self._dequantised(stored)
      part = stored.split(".")[2] if stored.startswith("blk.") else ""
      if adjacent and part in heads:
        array = rotate_half_order(array, heads[part])
      return array

    return build.build_params(config, get, str(self.path))

  def _dequantised(self, name: str) -> np.ndarray:
    tensor = self._tensors[name]
    kind = tensor.tensor_type.name
    if kind not in _TYPES:
      raise errors.WeightsError(
        f"{self.path}: tensor {name} has type {kind}: expected one of {', '.join(_TYPES)}"
      )
    return self._gguf.quants.dequantize(tensor.data, tensor.tensor_type)  # float32, (out, in)

  def _rope_scaling(self, theta: float, head_dim: int) -> config_lib.RopeScaling | None:
    if "rope_freqs.weight" not in self._tensors:
      return None
    stored = self._dequantised("rope_freqs.weight")
    scaling = config_lib.RopeScaling(
      factor=float(stored.max()),
      low_freq_factor=_LLAMA3_LOW,
      high_freq_factor=_LLAMA3_HIGH,
      original_context_tokens=_LLAMA3_CONTEXT,
    )
    plain = llama.scaled_frequencies(theta, head_dim, None)
    divisors = plain / llama.scaled_frequencies(theta, head_dim, scaling)
    if stored.shape != divisors.shape or not np.allclose(stored, divisors, rtol=1e-4):
      raise errors.WeightsError(f"{self.path}: rope_freqs.weight is not the Llama-3 scaling")
    return scaling


def rotate_half_order(array: np.ndarray, heads: int) -> np.ndarray:
  """Rows (2i, 2i+1) of each head to (i, i + head_dim/2): of a matrix [out, in] or a bias [out]."""
  rows = array.reshape(heads, -1, 2, *array.shape[1:])
  return rows.swapaxes(1, 2).reshape(array.shape)


def _gguf_name(name: str) -> str:
  if name in _NAMES:
    return _NAMES[name]
  layer, rest = name.removeprefix("model.layers.").split(".", 1)
  module, kind = rest.rsplit(".", 1)
  return f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}"
