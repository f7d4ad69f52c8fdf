"""From named tensors to the parameter pytree: names, shapes, dtypes, checks."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import config as config_lib
from strata_jax.models import errors, llama

# Name of a Hugging Face tensor -> its array, matrices as (out, in). KeyError when it is missing.
GetTensor = Callable[[str], np.ndarray]


def layer_shapes(config: config_lib.ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
  """What `layer_params` takes -> Hugging Face name below `model.layers.N.`, shape as stored."""
  hidden, inner = config.hidden_size, config.intermediate_size
  q, kv = config.num_heads * config.head_dim, config.kv_heads * config.head_dim
  shapes: dict[str, tuple[str, tuple[int, ...]]] = {
    "attn_norm": ("input_layernorm.weight", (hidden,)),
    "wq": ("self_attn.q_proj.weight", (q, hidden)),
    "wk": ("self_attn.k_proj.weight", (kv, hidden)),
    "wv": ("self_attn.v_proj.weight", (kv, hidden)),
    "wo": ("self_attn.o_proj.weight", (hidden, q)),
    "mlp_norm": ("post_attention_layernorm.weight", (hidden,)),
    "gate": ("mlp.gate_proj.weight", (inner, hidden)),
    "up": ("mlp.up_proj.weight", (inner, hidden)),
    "down": ("mlp.down_proj.weight", (hidden, inner)),
  }
  if config.qkv_bias:
    shapes |= {
      "bq": ("self_attn.q_proj.bias", (q,)),
      "bk": ("self_attn.k_proj.bias", (kv,)),
      "bv": ("self_attn.v_proj.bias", (kv,)),
    }
  return shapes


def layer_params(tensors: Mapping[str, jax.Array]) -> llama.LayerParams:
  """A layer of the tensors that `layer_shapes` names, matrices as [in, out].

  What makes q, k and v is put side by side: one product reads it faster than three.
  """
  fields = dict(tensors)
  for kind in "wb":
    parts = [fields.pop(kind + of) for of in "qkv" if kind + of in tensors]
    if parts:
      fields[f"{kind}qkv"] = jnp.concatenate(parts, axis=-1)
  return llama.LayerParams(**fields)


def build_params(config: config_lib.ModelConfig, get: GetTensor, source: str) -> llama.Params:
  """Reads all tensors of `config`, in its dtype; matrices are turned to [in, out].

  Raises:
    WeightsError: a tensor is missing or has another shape than the config asks for.
  """
  dtype = jnp.dtype(config.dtype)

  def read(name: str, shape: tuple[int, ...], turn: bool = False) -> jax.Array:
    try:
      array = get(name)
    except KeyError as error:
      raise errors.WeightsError(f"{source}: missing tensor {name}") from error
    if array.shape != shape:
      raise errors.WeightsError(
        f"{source}: tensor {name}: expected shape {shape}, got {tuple(array.shape)}"
      )
    array = array.T if turn and array.ndim == 2 else array
    return jnp.array(np.ascontiguousarray(array, dtype))  # a copy: the source may be a file map

  fields = layer_shapes(config)
  layers = tuple(
    layer_params(
      {
        field: read(f"model.layers.{layer}.{name}", shape, turn=True)
        for field, (name, shape) in fields.items()
      }
    )
    for layer in range(config.num_layers)
  )
  table = (config.vocab_size, config.hidden_size)
  embedding = read("model.embed_tokens.weight", table)
  output = embedding if config.tie_embeddings else read("lm_head.weight", table)
  norm = read("model.norm.weight", (config.hidden_size,))
  return llama.Params(
    embedding=embedding, layers=layers, head=llama.HeadParams(norm=norm, output=output)
  )
