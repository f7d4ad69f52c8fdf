"""The Llama family as pure functions over a parameter pytree.

Covers Llama 2 and 3.x (with the Llama-3.1 frequency scaling), SmolLM2 and Qwen2.5 (QKV biases):
RMSNorm, rotary positions in the rotate-half convention, grouped-query attention, SwiGLU, tied or
untied embeddings. Attention is handed in as a function, so that these functions know no pages.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import config as config_lib


@flax.struct.dataclass
class LayerParams:
  """One decoder layer; matrices are [in, out]."""

  attn_norm: jax.Array  # [hidden]
  wqkv: jax.Array  # [hidden, (num_heads + 2 * kv_heads) * head_dim], those of q, k and v in a row
  wo: jax.Array  # [num_heads * head_dim, hidden]
  mlp_norm: jax.Array  # [hidden]
  gate: jax.Array  # [hidden, intermediate]
  up: jax.Array  # [hidden, intermediate]
  down: jax.Array  # [intermediate, hidden]
  bqkv: jax.Array | None = None  # [(num_heads + 2 * kv_heads) * head_dim]


@flax.struct.dataclass
class HeadParams:
  """What turns the last hidden state into logits."""

  norm: jax.Array  # [hidden]
  output: jax.Array  # [vocab, hidden]; the embedding itself when tied


@flax.struct.dataclass
class Params:
  """All weights of a model."""

  embedding: jax.Array  # [vocab, hidden]
  layers: tuple[LayerParams, ...]
  head: HeadParams


# attend(q [B, T, num_heads, D], k [B, T, kv_heads, D], v) -> ([B, T, num_heads, D], state)
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def embed(embedding: jax.Array, token_ids: jax.Array) -> jax.Array:
  """Token ids [B, T] to hidden states [B, T, hidden]."""
  return jnp.take(embedding, token_ids, axis=0, mode="clip")


def decoder_layer(
  config: config_lib.ModelConfig,
  params: LayerParams,
  x: jax.Array,
  positions: jax.Array,
  attend: Attend,
) -> tuple[jax.Array, jax.Array]:
  """One layer.

  Args:
    config: the model.
    params: the layer's weights.
    x: hidden states [B, T, hidden].
    positions: int32 [B, T], the tokens' places in their contexts.
    attend: attention over everything before and in the chunk; its second result is handed through.

  Returns:
    Hidden states [B, T, hidden], and what `attend` returned beside its output.
  """
  q, k, v = attention_inputs(config, params, x, positions)
  out, state = attend(q, k, v)
  return finish_layer(config, params, x, out), state


def attention_inputs(
  config: config_lib.ModelConfig, params: LayerParams, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The part of a layer before attention: rotated q [B, T, num_heads, D] and k, and v."""
  batch, chunk, _ = x.shape
  y = rms_norm(x, params.attn_norm, config.rms_norm_eps)
  qkv = _project(y, params.wqkv, params.bqkv).reshape(batch, chunk, -1, config.head_dim)
  q, k, v = jnp.split(qkv, [config.num_heads, config.num_heads + config.kv_heads], axis=2)
  cos, sin = rope_tables(config, positions)
  return rotate(q, cos, sin), rotate(k, cos, sin), v


def finish_layer(
  config: config_lib.ModelConfig, params: LayerParams, x: jax.Array, out: jax.Array
) -> jax.Array:
  """The part of a layer behind attention, whose result is `out` [B, T, num_heads, D]."""
  batch, chunk, _ = x.shape
  x = x + _project(out.reshape(batch, chunk, -1), params.wo)
  y = rms_norm(x, params.mlp_norm, config.rms_norm_eps)
  gated = jax.nn.silu(_project(y, params.gate)) * _project(y, params.up)
  return x + _project(gated, params.down)


def logits(config: config_lib.ModelConfig, params: HeadParams, x: jax.Array) -> jax.Array:
  """Hidden states [..., hidden] to float32 logits [..., vocab]."""
  y = rms_norm(x, params.norm, config.rms_norm_eps)
  contract = (((y.ndim - 1,), (1,)), ((), ()))
  return jax.lax.dot_general(
    y, params.output, contract, precision=precision(y.dtype), preferred_element_type=jnp.float32
  )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  """x / rms(x) * weight over the last axis, in float32 inside."""
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
  return y.astype(x.dtype) * weight


def scaled_frequencies(
  theta: float, head_dim: int, scaling: config_lib.RopeScaling | None
) -> np.ndarray:
  """Radians a position, float64 [head_dim / 2], with the Llama-3.1 scaling when given.

  Long wavelengths are divided by `factor`, short ones kept, those between interpolated; as in the
  `rope_scaling` of the public Llama-3.1 release.
  """
  frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  if scaling is None:
    return frequencies
  turns = scaling.original_context_tokens * frequencies / (2 * np.pi)
  span = scaling.high_freq_factor - scaling.low_freq_factor
  keep = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
  return frequencies * (keep + (1.0 - keep) / scaling.factor)


def rope_tables(
  config: config_lib.ModelConfig, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """cos and sin of the angles, float32 [B, T, 1, head_dim / 2] each."""
  frequencies = scaled_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
  angles = positions[..., None, None].astype(jnp.float32) * frequencies.astype(np.float32)
  return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotary embedding of [B, T, heads, head_dim]: pairs are (i, i + head_dim / 2)."""
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def precision(dtype: jnp.dtype) -> jax.lax.Precision:
  """Full float32 products for float32 (a GPU would take TF32), the default for 16 bits."""
  if dtype == jnp.float32:
    return jax.lax.Precision.HIGHEST
  return jax.lax.Precision.DEFAULT


def _project(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
  y = jnp.matmul(x, weight, precision=precision(x.dtype))
  return y if bias is None else y + bias
