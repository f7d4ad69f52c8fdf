"""Stacks of layers with Llama-3.1-8B's shapes, for the compute side of `io_interference`.

All layers share their weights: 0.44 GB are far beyond the L2 cache, so that reads them anew.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """Of one layer; the defaults are Llama-3.1-8B's."""

  model_dim: int = 4096
  heads: int = 32
  kv_heads: int = 8
  head_dim: int = 128
  mlp_dim: int = 14336


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
  """A pure function of (activations, arrays) and what it is called with."""

  run: Callable[[jax.Array, Any], jax.Array]
  activations: jax.Array
  arrays: Any


def prefill(
  tokens: int,
  layers: int,
  attention: Literal["cudnn", "xla"],
  shape: Shape | None = None,
  dtype=jnp.bfloat16,
) -> Stack:
  """One prompt of `tokens` tokens, with causal attention."""
  shape = shape or Shape()

  def attend(q, k, v, _):
    q, k, v = (x.reshape(1, tokens, -1, shape.head_dim) for x in (q, k, v))
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
    return out.reshape(tokens, -1)

  return _stack(tokens, layers, shape, attend, {}, dtype)


def decode(
  batch: int, context: int, layers: int, shape: Shape | None = None, dtype=jnp.bfloat16
) -> Stack:
  """One token of every sequence of a batch, over a context that lies densely in memory."""
  shape = shape or Shape()
  group = shape.heads // shape.kv_heads
  keys = jax.random.split(jax.random.key(1), 2)
  kv_shape = (batch, shape.kv_heads, context, shape.head_dim)
  cache = {
    name: jax.random.normal(key, kv_shape, dtype)
    for name, key in zip(("k", "v"), keys, strict=True)
  }

  def attend(q, k, v, arrays):
    del k, v  # one token among thousands
    q = q.reshape(batch, shape.kv_heads, group, shape.head_dim)
    logits = jnp.einsum("bkgd,bksd->bkgs", q, arrays["k"], preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(logits * shape.head_dim**-0.5).astype(dtype)
    return jnp.einsum("bkgs,bksd->bkgd", weights, arrays["v"]).reshape(batch, -1)

  return _stack(batch, layers, shape, attend, cache, dtype)


def small_stacks() -> Mapping[str, Stack]:
  """Both kinds in a size for a CPU."""
  shape = Shape(model_dim=64, heads=4, kv_heads=2, head_dim=16, mlp_dim=128)
  return {
    "prefill": prefill(32, 2, "xla", shape, jnp.float32),
    "decode": decode(4, 64, 2, shape, jnp.float32),
  }


def _stack(rows: int, layers: int, shape: Shape, attend, more, dtype) -> Stack:
  q_dim, kv_dim = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
  sizes = {
    "qkv": (shape.model_dim, q_dim + 2 * kv_dim),
    "out": (q_dim, shape.model_dim),
    "gate_up": (shape.model_dim, 2 * shape.mlp_dim),
    "down": (shape.mlp_dim, shape.model_dim),
  }
  keys = jax.random.split(jax.random.key(0), len(sizes) + 1)
  arrays = {
    name: (jax.random.normal(key, size, dtype) * size[0] ** -0.5).astype(dtype)
    for (name, size), key in zip(sizes.items(), keys[1:], strict=True)
  }

  def layer(x, arrays):
    q, k, v = jnp.split(_norm(x) @ arrays["qkv"], (q_dim, q_dim + kv_dim), axis=-1)
    x = x + attend(q, k, v, arrays) @ arrays["out"]
    gate, up = jnp.split(_norm(x) @ arrays["gate_up"], 2, axis=-1)
    return x + (jax.nn.silu(gate) * up) @ arrays["down"]

  def run(x, arrays):
    for _ in range(layers):  # unrolled: an annotated region takes no loop
      x = layer(x, arrays)
    return x

  x = jax.random.normal(keys[0], (rows, shape.model_dim), dtype)
  return Stack(run=run, activations=x, arrays=arrays | more)


def _norm(x: jax.Array) -> jax.Array:
  wide = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
  return (wide * scale).astype(x.dtype)
