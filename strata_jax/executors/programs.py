"""The compiled programs of the JAX executor, and a counter of compilations.

One small program a layer, called once for each: it compiles in well under a second where a program
of all layers takes long, all layers share it, and between two calls a load of the next layer can be
put beside the compute.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import attention, sampling
from strata_jax import config as config_lib
from strata_jax.executors import streams
from strata_jax.models import llama
from strata_jax.pallas_kernels import host_memory
from strata_jax.pallas_kernels.fragment_io import api as fragment_io

_LOOPLESS = ("cudnn", "hopper")  # implementations of attention that can stand in a region
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

Lower = Callable[[], jax.stages.Lowered]  # a program for some shapes, ready to be compiled


class Where(NamedTuple):
  """The KV of a batch."""

  page_table: jax.Array  # int32 [B, N]
  starts: jax.Array  # int32 [B], tokens before the chunks
  lengths: jax.Array  # int32 [B], valid tokens of the chunks
  plan: attention.Plan = None  # of its reads, if there is one for all layers


def shapes_on(sharding: jax.sharding.Sharding, tree: Any) -> Any:
  """A tree of arrays or shapes as shapes with this sharding, for lowering."""
  return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


@functools.partial(jax.jit, static_argnames=("config", "implementation", "page_size"))
def enter(
  embedding: jax.Array,
  token_ids: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
  *,
  config: config_lib.ModelConfig,
  implementation: str,
  page_size: int,
) -> tuple[jax.Array, attention.Plan]:
  """What comes before the first layer of a batch.

  Args:
    embedding: [vocab, hidden].
    token_ids: int32 [B, T].
    page_table: see `Where`.
    starts: likewise.
    lengths: likewise.
    config: static.
    implementation: of attention, static.
    page_size: of the pools, static.

  Returns:
    [B, T, hidden], and what all layers would work out alike.
  """
  plan = attention.plan_reads(
    page_table, starts, lengths, chunk=token_ids.shape[1], heads=config.num_heads,
    kv_heads=config.kv_heads, page_size=page_size, implementation=implementation,
  )  # fmt: skip
  return llama.embed(embedding, token_ids), plan


def _layer(
  params: llama.LayerParams,
  x: jax.Array,
  pool: jax.Array,
  where: Where,
  *,
  config: config_lib.ModelConfig,
  implementation: str,
) -> tuple[jax.Array, jax.Array]:
  """One layer over a batch of chunks; writes their KV and attends to all that is before.

  Args:
    params: of the layer.
    x: [B, T, hidden].
    pool: of the layer, donated: [pages, 2, page_size, kv_heads, head_dim].
    where: of the batch.
    config: static.
    implementation: of attention, static.

  Returns:
    [B, T, hidden] and the pool.
  """

  def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    written = attention.write_kv(pool, k, v, *where[:3])
    out = attention.paged_attention(
      q, k, v, written, *where[:3], implementation=implementation, plan=where.plan
    )
    return out, written

  positions = where.starts[:, None] + jnp.arange(x.shape[1])
  return llama.decoder_layer(config, params, x, positions, attend)


_STATIC = ("config", "implementation")
_same_layer = jax.jit(_layer, static_argnames=_STATIC)  # lowered once in a program of many


def _layers(
  params: tuple[llama.LayerParams, ...],
  x: jax.Array,
  pools: tuple[jax.Array, ...],
  where: Where,
  *,
  config: config_lib.ModelConfig,
  implementation: str,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  """`_layer` for some layers in a row: fewer programs to launch, each longer to compile."""
  written = []
  for one, pool in zip(params, pools, strict=True):
    x, pool = _same_layer(one, x, pool, where, config=config, implementation=implementation)
    written.append(pool)
  return x, tuple(written)


def _joint_layer(
  params: llama.LayerParams,
  x: jax.Array,
  pool: jax.Array,
  wheres: tuple[Where, ...],
  *,
  sizes: tuple[tuple[int, int], ...],
  config: config_lib.ModelConfig,
  implementation: str,
) -> tuple[jax.Array, jax.Array]:
  """`_layer` over several batches: the weights are read once for all of them.

  Args:
    params: of the layer.
    x: [1, tokens of all batches, hidden].
    pool: of the layer, donated.
    wheres: of each batch.
    sizes: (B, T) of each batch, static.
    config: static.
    implementation: of attention, static.

  Returns:
    Hidden states as they came, and the pool. Each batch may attend to what the others write.
  """

  def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    written, parts = pool, [_cut(one, sizes) for one in (q, k, v)]
    for _, k, v, where in zip(*parts, wheres, strict=True):
      written = attention.write_kv(written, k, v, *where[:3])
    outs = [
      attention.paged_attention(
        q, k, v, written, *where[:3], implementation=implementation, plan=where.plan
      )
      for q, k, v, where in zip(*parts, wheres, strict=True)
    ]
    return _side_by_side(outs), written

  positions = _side_by_side(
    [where.starts[:, None] + jnp.arange(size[1]) for where, size in zip(wheres, sizes, strict=True)]
  )
  return llama.decoder_layer(config, params, x, positions, attend)


def _cut(x: jax.Array, sizes: tuple[tuple[int, int], ...]) -> list[jax.Array]:
  """[1, tokens, ...] -> [B, T, ...] of each batch."""
  ends = np.cumsum([rows * tokens for rows, tokens in sizes])[:-1]
  parts = jnp.split(x[0], ends)
  return [part.reshape(*size, *x.shape[2:]) for part, size in zip(parts, sizes, strict=True)]


def _side_by_side(parts: Sequence[jax.Array]) -> jax.Array:
  """The opposite of `_cut`."""
  return jnp.concatenate([part.reshape(-1, *part.shape[2:]) for part in parts])[None]


_same_joint_layer = jax.jit(_joint_layer, static_argnames=(*_STATIC, "sizes"))


def _joint_layers(
  params: tuple[llama.LayerParams, ...],
  xs: tuple[jax.Array, ...],
  pools: tuple[jax.Array, ...],
  wheres: tuple[Where, ...],
  *,
  config: config_lib.ModelConfig,
  implementation: str,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
  """`_joint_layer` for some layers in a row; `xs`: [B, T, hidden] of each batch."""
  sizes = tuple((x.shape[0], x.shape[1]) for x in xs)
  x, written = _side_by_side(xs), []
  for one, pool in zip(params, pools, strict=True):
    x, pool = _same_joint_layer(
      one, x, pool, wheres, sizes=sizes, config=config, implementation=implementation
    )
    written.append(pool)
  return tuple(_cut(x, sizes)), tuple(written)


# XLA would make one product of several with the same states and put the weights side by side for
# it, in every call (24 us a layer of Llama-3.1-8B on an H200 for those of q, k and v).
_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 0}
layer = jax.jit(_layer, static_argnames=_STATIC, donate_argnames="pool", compiler_options=_OPTIONS)
layers = jax.jit(
  _layers, static_argnames=_STATIC, donate_argnames="pools", compiler_options=_OPTIONS
)
joint_layers = jax.jit(
  _joint_layers, static_argnames=_STATIC, donate_argnames="pools", compiler_options=_OPTIONS
)


def _layer_beside_load(
  params: llama.LayerParams,
  x: jax.Array,
  pool: jax.Array,
  following: jax.Array,
  host: jax.Array,
  following_layer: jax.Array,
  load_lists: tuple[jax.Array, jax.Array, jax.Array],
  where: Where,
  *,
  config: config_lib.ModelConfig,
  implementation: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`_layer`, and a load into the pool of the layer that follows.

  Args:
    params: as in `_layer`, like all that is not named here.
    x: likewise.
    pool: likewise.
    following: the pool of the next layer, donated.
    host: the host pool.
    following_layer: int32 [], which layer that is.
    load_lists: count int32 [], host slots and device slots int32 [bucket], host slots ascending.
    where: likewise; a plan is not used.
    config: likewise.
    implementation: likewise.

  Returns:
    [B, T, hidden] and the two pools.
  """
  host = host_memory.device_view(host)
  load = functools.partial(
    _load_layer, implementation="mosaic_gpu", config=fragment_io.FragmentIoConfig(sort_from=2**31)
  )
  load_args = (following, host, following_layer, *load_lists)
  kv_where = where[:3]
  how: Any = {"config": config, "implementation": implementation}
  if implementation in _LOOPLESS:
    following, y = streams.beside(
      load, load_args, functools.partial(_whole_layer, **how), (x, params, pool, *kv_where)
    )
    x, k, v = _split(config, y)
    return x, attention.write_kv(pool, k, v, *kv_where), following
  # Attention that loops cannot stand in a region: the load runs beside what follows it alone.
  positions = where.starts[:, None] + jnp.arange(x.shape[1])
  q, k, v = llama.attention_inputs(config, params, x, positions)
  pool = attention.write_kv(pool, k, v, *kv_where)
  out = attention.paged_attention(q, k, v, pool, *kv_where, implementation=implementation)

  def finish(x, params, out):
    return llama.finish_layer(config, params, x, out)

  following, x = streams.beside(load, load_args, finish, (x, params, out))
  return x, pool, following


def _whole_layer(
  x: jax.Array,
  params: llama.LayerParams,
  pool: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  lengths: jax.Array,
  *,
  config: config_lib.ModelConfig,
  implementation: str,
) -> jax.Array:
  """[B, T, hidden + 2 * kv_heads * head_dim]: the hidden states, and K and V to be written.

  One array, since XLA awaits a region with several results before it starts the other one.
  """
  positions = starts[:, None] + jnp.arange(x.shape[1])
  q, k, v = llama.attention_inputs(config, params, x, positions)
  out = attention.unwritten_attention(
    q, k, v, pool, page_table, starts, lengths, implementation=implementation
  )
  x = llama.finish_layer(config, params, x, out)
  return jnp.concatenate([x, *(a.reshape(*x.shape[:2], -1) for a in (k, v))], axis=-1)


def _split(config: config_lib.ModelConfig, y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """What `_whole_layer` put side by side: x, and K and V [B, T, kv_heads, head_dim]."""
  width = config.kv_heads * config.head_dim
  x, k, v = jnp.split(y, [config.hidden_size, config.hidden_size + width], axis=-1)
  heads = (*y.shape[:2], config.kv_heads, config.head_dim)
  return x, k.reshape(heads), v.reshape(heads)


@functools.partial(jax.jit, static_argnames="implementation", donate_argnames="pool")
def load_layer(
  pool: jax.Array,
  host: jax.Array,
  layer_index: jax.Array,
  count: jax.Array,
  host_slots: jax.Array,
  device_slots: jax.Array,
  *,
  implementation: fragment_io.Implementation,
) -> jax.Array:
  """Loads fragments of one layer into its pool, which is donated."""
  return _load_layer(
    pool, host, layer_index, count, host_slots, device_slots, implementation=implementation
  )


def _load_layer(
  pool: jax.Array,
  host: jax.Array,
  layer_index: jax.Array,
  count: jax.Array,
  host_slots: jax.Array,
  device_slots: jax.Array,
  **how: Any,
) -> jax.Array:
  return fragment_io.load_fragments(
    host, (pool,), host_slots, device_slots, count, layer=layer_index, **how
  )[0]


_DONATED = ("pool", "following")
layer_beside_load = jax.jit(
  _layer_beside_load, static_argnames=_STATIC, donate_argnames=_DONATED,
  compiler_options=_OPTIONS | streams.COMPILER_OPTIONS,
)  # fmt: skip


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames=_DONATED)
def layer_after_load(
  params: llama.LayerParams,
  x: jax.Array,
  pool: jax.Array,
  following: jax.Array,
  host: jax.Array,
  following_layer: jax.Array,
  load_lists: tuple[jax.Array, jax.Array, jax.Array],
  where: Where,
  *,
  config: config_lib.ModelConfig,
  implementation: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`layer_beside_load` for devices without streams."""
  following = _load_layer(following, host, following_layer, *load_lists, implementation="reference")
  x, pool = _layer(params, x, pool, where, config=config, implementation=implementation)
  return x, pool, following


@functools.cache
def head_on(device: jax.Device):
  """`_head`, compiled for a device: what it samples is written to host memory by the program.

  A transfer of its own, after the program, takes 0.4 ms more until the host has it.
  """
  on = functools.partial(jax.sharding.SingleDeviceSharding, device)
  return jax.jit(
    _head, static_argnames="config", out_shardings=(on(), on(memory_kind="pinned_host"))
  )


def _head(
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
    Token ids int32 [B, 1], the input of a next decode step, and what is sampled, int32 [B, 2], see
    `sampling.Sampled.packed`.
  """
  last = jnp.maximum(lengths - 1, 0)[:, None, None]
  states = jnp.take_along_axis(x, last, axis=1)[:, 0]
  rows = len(states)
  if rows == 1:  # a GPU would turn the whole matrix into float32 for the product with one row
    states = jax.lax.optimization_barrier(jnp.concatenate([states, states]))
  logits = jax.lax.optimization_barrier(llama.logits(config, params, states))[:rows]
  sampled = sampling.sample(logits, temperatures, seeds, indices)
  return sampled.token_ids[:, None], sampled.packed()


@jax.jit
def marker(x: jax.Array) -> jax.Array:
  """One element: ready when `x` is, and not donated with it."""
  return x[(0,) * x.ndim]


class CompileCounter:
  """Counts compilations of all threads while it is entered, by the events that JAX reports."""

  def __init__(self) -> None:
    self.count = 0
    self._lock = threading.Lock()

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
      with self._lock:
        self.count += 1
