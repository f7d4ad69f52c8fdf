"""A model on its device: batches go through all layers, loads beside them."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from strata_jax import config as config_lib
from strata_jax.executors import gated_loads, programs
from strata_jax.models import llama
from strata_jax.tiers import io_backend

# Count int32 [], host slots and device slots int32 [bucket]: what a program is to load.
LoadLists = tuple[jax.Array, jax.Array, jax.Array]


class Batch(NamedTuple):
  """Rows that a program computes together."""

  token_ids: jax.Array  # int32 [B, T]
  table: jax.Array  # int32 [B, N]
  starts: jax.Array  # int32 [B], tokens before the chunk
  lengths: jax.Array  # int32 [B], valid tokens of the chunk


class LayerStack:
  """The programs with the weights that they take; the pools are handed in and out."""

  def __init__(
    self,
    config: config_lib.ModelConfig,
    params: llama.Params,
    attention: str,
    device: jax.Device,
    *,
    layers_per_program: Sequence[int] = (1,),
  ) -> None:
    """Puts the weights on the device.

    Args:
      config: the model.
      params: its weights.
      attention: an implementation by name.
      device: where all of it runs.
      layers_per_program: layers of the first program, the second and so on, the last number for
        all others, where nothing is loaded beside them. Where something is, the largest of these
        programs that finds its layers loaded when it is launched, or a layer alone.
    """
    self._config = config
    self._params = jax.device_put(params, device)
    self._groups = tuple(_groups(config.num_layers, layers_per_program))
    self._sizes = sorted({group.stop - group.start for group in self._groups}, reverse=True)
    self._warm_sizes = sorted({*self._sizes, 1}, reverse=True)
    self._how = {"config": config, "implementation": attention}
    self._layer_ids = jax.device_put(
      tuple(np.int32(index) for index in range(config.num_layers)), device
    )
    on_gpu = device.platform == "gpu"
    self._layer_and_load = programs.layer_beside_load if on_gpu else programs.layer_after_load
    self._load_by = "mosaic_gpu" if on_gpu else "reference"
    self._head = programs.head_on(device)

  def load_first(
    self, pools: io_backend.DevicePool, host: io_backend.HostPool, lists: Sequence[LoadLists]
  ) -> io_backend.DevicePool:
    """Loads the first layer, which `run` with the same lists leaves out."""
    first, *others = pools
    for load_lists in lists:
      first = programs.load_layer(
        first, host, self._layer_ids[0], *load_lists, implementation=self._load_by
      )
    return (first, *others)

  def run(
    self,
    pools: io_backend.DevicePool,
    batches: Sequence[Batch],
    *,
    host: io_backend.HostPool | None = None,
    lists: Sequence[LoadLists] = (),
    gate: gated_loads.Gate | None = None,
    reached: Callable[[int, jax.Array], None] | None = None,
  ) -> tuple[list[jax.Array], io_backend.DevicePool]:
    """Computes all batches layer by layer, each layer in the order of the batches.

    Args:
      pools: of the device; they take the KV of the batches.
      batches: what to compute; a later one may attend to what an earlier one writes.
      host: the host pool, if there are lists.
      lists: what to load into layer l + 1 while layer l is computed, for each batch.
      gate: keeps layers behind their loads.
      reached: is handed each layer and a pool that is ready once its loads are done.

    Returns:
      Hidden states [B, T, hidden] of each batch, and the pools.
    """
    xs, wheres = self._enter(batches, pools)
    now = list(pools)
    last = len(now) - 1
    for group in self._programs(gate, by_layer=bool(lists)):
      end = group.stop - 1
      if gate is not None:
        now[end] = gate.hold(end, now[end])
      if reached is not None:
        for index in range(group.start, group.stop):
          reached(index, now[end])
      for at, where in enumerate(wheres):
        if host is not None and lists and end < last:
          xs[at], now[end], now[end + 1] = self._layer_and_load(
            self._params.layers[end], xs[at], now[end], now[end + 1], host,
            self._layer_ids[end + 1], lists[at], where, **self._how,
          )  # fmt: skip
        else:
          xs[at], now[group] = self._compute(group, xs[at], now[group], where)
    return xs, tuple(now)

  def run_joint(
    self, pools: io_backend.DevicePool, batches: Sequence[Batch], *, warms: bool = False
  ) -> tuple[list[jax.Array], io_backend.DevicePool]:
    """Computes batches in one pass, with nothing beside it; see `programs.joint_layers`.

    `warms`: it is to compile what `warm` does not for each batch; a group of each size will do.
    """
    entered, wheres = self._enter(batches, pools)
    xs, now = tuple(entered), list(pools)
    for group in [slice(0, size) for size in self._sizes] if warms else self._groups:
      xs, now[group] = programs.joint_layers(
        self._params.layers[group], xs, tuple(now[group]), tuple(wheres), **self._how
      )
    return list(xs), tuple(now)

  def _programs(self, gate: gated_loads.Gate | None, *, by_layer: bool) -> Iterator[slice]:
    """The layers of each program, to be launched as it is named."""
    if gate is None and not by_layer:
      yield from self._groups
      return
    first, layers = 0, self._config.num_layers
    while first < layers:
      ends = [first + size for size in self._sizes if first + size <= layers]
      end = next((e for e in ends if gate is not None and gate.is_loaded(e - 1)), first + 1)
      yield slice(first, end)
      first = end

  def _compute(
    self, group: slice, x: jax.Array, pools: Sequence[jax.Array], where: programs.Where
  ) -> tuple[jax.Array, Sequence[jax.Array]]:
    """Some layers in one program."""
    program, args = self._program(group, x, pools, where)
    x, written = program(*args, **self._how)
    return x, written if program is programs.layers else (written,)

  def _program(
    self, group: slice, x: jax.Array, pools: Sequence[jax.Array], where: programs.Where
  ) -> tuple[Any, tuple[Any, ...]]:
    """The program of some layers, and its arguments."""
    params = self._params.layers[group]
    if len(params) > 1:
      return programs.layers, (params, x, tuple(pools), where)
    return programs.layer, (*params, x, *pools, where)

  def head(
    self, x: jax.Array, lengths: jax.Array, draws: tuple[jax.Array, jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    """Token ids int32 [B, 1] on the device, int32 [B, 2] on the host; see `programs.head_on`."""
    return self._head(self._params.head, x, lengths, *draws, config=self._config)

  def warm(
    self,
    pools: io_backend.DevicePool,
    batch: Batch,
    host: io_backend.HostPool | None,
    nothing: LoadLists | None,
  ) -> tuple[jax.Array, io_backend.DevicePool]:
    """Compiles what `run` needs for the shape of `batch`: the first layer stands for all.

    Args:
      pools: of the device.
      batch: with lengths of 0, so that nothing is written.
      host: the host pool.
      nothing: a count of 0 and slots, if loads are to run beside the compute.

    Returns:
      [B, T, hidden] and the pools.
    """
    params = self._params.layers[0]
    (x,), (where,) = self._enter([batch], pools)
    now = list(pools)
    for size in self._warm_sizes:
      group = slice(0, size)
      x, now[group] = self._compute(group, x, now[group], where)
    first, *others = now
    if nothing is not None and host is not None:
      first, *others = self.load_first((first, *others), host, [nothing])
      if others:
        more: Any = (host, self._layer_ids[1], nothing)
        x, first, others[0] = self._layer_and_load(
          params, x, first, others[0], *more, where, **self._how
        )
    programs.marker(x)
    programs.marker(first)
    return x, (first, *others)

  def lower(
    self,
    pools: io_backend.DevicePool,
    batch: Batch,
    draws: tuple[jax.Array, jax.Array, jax.Array],
    host: io_backend.HostPool | None,
    nothing: LoadLists | None,
  ) -> Iterator[programs.Lower]:
    """What `warm` and `head` call for the shape of a batch; shapes alone will do for it."""
    (x,), (where,) = self._enter_shapes([batch], pools)
    for size in self._warm_sizes:
      program, args = self._program(slice(0, size), x, pools[:size], where)
      yield functools.partial(program.lower, *args, **self._how)
    if nothing is not None and host is not None and len(pools) > 1:
      yield functools.partial(
        self._layer_and_load.lower, self._params.layers[0], x, *pools[:2], host,
        self._layer_ids[1], nothing, where, **self._how,
      )  # fmt: skip
    yield functools.partial(
      self._head.lower, self._params.head, x, batch.lengths, *draws, config=self._config
    )
    yield self._entry(batch, pools, programs.enter.lower)
    yield functools.partial(programs.marker.lower, x)

  def lower_joint(
    self, pools: io_backend.DevicePool, batches: Sequence[Batch]
  ) -> Iterator[programs.Lower]:
    """What `run_joint` calls besides, likewise."""
    xs, wheres = self._enter_shapes(batches, pools)
    for size in self._sizes:
      yield functools.partial(
        programs.joint_layers.lower, self._params.layers[:size], tuple(xs), pools[:size],
        tuple(wheres), **self._how,
      )  # fmt: skip

  def _enter(
    self,
    batches: Sequence[Batch],
    pools: io_backend.DevicePool,
    enter: Callable[..., Any] = programs.enter,
  ) -> tuple[list[jax.Array], list[programs.Where]]:
    """Hidden states [B, T, hidden] of each batch before the first layer, and where its KV is."""
    xs, wheres = [], []
    for batch in batches:
      x, plan = self._entry(batch, pools, enter)()
      xs.append(x)
      wheres.append(programs.Where(batch.table, batch.starts, batch.lengths, plan))
    return xs, wheres

  def _enter_shapes(
    self, batches: Sequence[Batch], pools: io_backend.DevicePool
  ) -> tuple[list[jax.Array], list[programs.Where]]:
    """The shapes of what `_enter` returns."""
    entered = self._enter(batches, pools, programs.enter.eval_shape)
    return programs.shapes_on(self._params.embedding.sharding, entered)

  def _entry(
    self, batch: Batch, pools: io_backend.DevicePool, enter: Callable[..., Any]
  ) -> Callable[[], Any]:
    """A call of `programs.enter`, of its shapes or of its lowering."""
    return functools.partial(
      enter, self._params.embedding, *batch, page_size=pools[0].shape[2], **self._how
    )


def _groups(layers: int, sizes: Sequence[int]) -> Iterator[slice]:
  """Layers in groups of these sizes, the last of them again and again."""
  first = 0
  for size in itertools.chain(sizes, itertools.repeat(sizes[-1])):
    if first >= layers:
      return
    yield slice(first, min(first + size, layers))
    first += size
