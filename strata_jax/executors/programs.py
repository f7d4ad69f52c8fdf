"""The compiled programs of the JAX executor, and a counter of compilations.

One small program a layer, called once for each: it compiles in well under a second where a program
of all layers takes long, all layers share it, and between two calls a load of the next layer can be
put beside the compute.
"""

import functools
from types import TracebackType

import jax
import jax.numpy as jnp

from strata_jax import attention, sampling
from strata_jax import config as config_lib
from strata_jax.models import llama

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@jax.jit
def embed(embedding: jax.Array, token_ids: jax.Array) -> jax.Array:
  """[vocab, hidden], int32 [B, T] -> [B, T, hidden]."""
  return llama.embed(embedding, token_ids)


@functools.partial(jax.jit, static_argnames=("config", "implementation"), donate_argnames="pool")
def layer(
  params: llama.LayerParams,
  x: jax.Array,
  pool: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
  *,
  config: config_lib.ModelConfig,
  implementation: str,
) -> tuple[jax.Array, jax.Array]:
  """One layer over a batch of chunks; writes their KV and attends to all that is before.

  Args:
    params: of the layer.
    x: [B, T, hidden].
    pool: of the layer, donated: [pages, 2, page_size, kv_heads, head_dim].
    page_table: int32 [B, N].
    starts: int32 [B], tokens before the chunks.
    lengths: int32 [B], valid tokens of the chunks.
    config: static.
    implementation: of attention, static.

  Returns:
    [B, T, hidden] and the pool.
  """

  def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    written = attention.write_kv(pool, k, v, page_table, starts, lengths)
    out = attention.paged_attention(
      q, k, v, written, page_table, starts, lengths, implementation=implementation
    )
    return out, written

  positions = starts[:, None] + jnp.arange(x.shape[1])
  return llama.decoder_layer(config, params, x, positions, attend)


@functools.partial(jax.jit, static_argnames="config")
def head(
  params: llama.HeadParams,
  x: jax.Array,
  lengths: jax.Array,
  temperatures: jax.Array,
  seeds: jax.Array,
  indices: jax.Array,
  *,
  config: config_lib.ModelConfig,
) -> tuple[jax.Array, jax.Array]:
  """The next token behind the last valid hidden state of each row.

  Args:
    params: norm and output matrix.
    x: [B, T, hidden].
    lengths: int32 [B], valid tokens of the chunks.
    temperatures: float32 [B]; see `sampling.sample`, the next two as well.
    seeds: uint32 [B].
    indices: int32 [B].
    config: static.

  Returns:
    Token ids [B, 1], the input of a next decode step, and gaps [B].
  """
  last = jnp.maximum(lengths - 1, 0)[:, None, None]
  logits = llama.logits(config, params, jnp.take_along_axis(x, last, axis=1)[:, 0])
  sampled = sampling.sample(logits, temperatures, seeds, indices)
  return sampled.token_ids[:, None], sampled.gaps


@jax.jit
def marker(x: jax.Array) -> jax.Array:
  """One element: ready when `x` is, and not donated with it."""
  return x[(0,) * x.ndim]


class CompileCounter:
  """Counts compilations while it is entered, by the events that JAX itself reports."""

  def __init__(self) -> None:
    self.count = 0

  def __enter__(self) -> "CompileCounter":
    jax.monitoring.register_event_duration_secs_listener(self._listen)
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    jax.monitoring.unregister_event_duration_listener(self._listen)

  def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
    del duration_secs
    if event == _COMPILE_EVENT:
      self.count += 1
