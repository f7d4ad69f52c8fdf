"""The executor with real pages and a real model, on JAX's default device."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from strata_jax import config as config_lib
from strata_jax import sampling as sampling_lib
from strata_jax.executors import (
  batch_inputs,
  choices,
  clock,
  fragment_copies,
  gated_loads,
  layer_stack,
  load_shares,
  packed_rows,
  page_mover,
  programs,
  protocol,
  shared_reads,
  staged_loads,
  storage_io,
  transfers_aside,
  warm_up,
  watcher,
)
from strata_jax.executors import buckets as buckets_lib
from strata_jax.executors import pools as pools_lib
from strata_jax.executors.running_step import RunningStep
from strata_jax.models import llama
from strata_jax.tiers import host as host_tier
from strata_jax.tiers import io_backend, layout, page_store


class JaxExecutor:
  """Implements `protocol.Executor`.

  A step is launched in the order backups, loads, prefills, decodes (backups that run beside it come
  last); the order in which pages are read and written follows from data dependence, since every
  pool is passed through every program that touches it. `launch` only enqueues; a thread beside it
  waits for each part in that order and takes the time at which it was done; `wait` hands the events
  over.

  Prefills of few tokens (`joint_tokens`) with which no loads ride go through the layers together
  with the first decodes: the weights are read once for both.

  Loads overlap compute in one of two ways. `whole`: all layers are loaded, then the compute begins.
  `layer`: the pages of all loads of a step are loaded layer by layer, those of layer l + 1 beside
  the compute of layer l, each batch of the step with a share of the pages beside it; without
  prefills each decode step takes a share along. Copies by the driver (see `gated_loads`) run
  beside prefills alone; how long the compute stood at their gates counts as stall. With kernels the
  first layer's load, which is not hidden, counts alone.
  Backups and parked loads by the driver's copies run beside all of it (see `side_copies` and
  `staged_loads`).

  Shapes are padded to `buckets`. `warmup` compiles all programs; afterwards `recompiles` counts
  compilations that a step caused, which is a bug.
  """

  def __init__(
    self,
    config: config_lib.ModelConfig,
    params: llama.Params,
    page_layout: layout.PageLayout,
    *,
    device_pages: int,
    host_pages: int,
    buckets: buckets_lib.Buckets,
    io: str = "auto",
    store_io: str | None = None,
    attention: str = "auto",
    overlap: str = "auto",
    layers_per_program: Sequence[int] = (1,),
    store: page_store.PageStore | None = None,
    pools: pools_lib.Pools | None = None,
  ) -> None:
    """Makes the pools.

    Args:
      config: the model.
      params: its weights.
      page_layout: of the pools, normally `config.page_layout(page_size)`.
      device_pages: pages of the device pool.
      host_pages: pages of the host pool; 0: no host tier.
      buckets: padded shapes, normally from `make_buckets`.
      io: the I/O back end by name, see `io_auto.make_io_backend`.
      store_io: that of stores, if it is another one than that of loads.
      attention: the implementation of attention by name; auto: the fastest that can be.
      overlap: how loads overlap compute; auto: by layer on a GPU if the back end can, else whole.
      layers_per_program: layers of the first program, the second and so on, the last number for
        all others, where nothing is loaded beside them, or what is loaded into them is there: more
        take less time to launch, and more to compile and until the first kernel begins.
      store: of the storage tier, with pages as large as the layout's; stays the caller's. With one,
        `close` has to be called before the executor is given up.
      pools: of an executor that was given up, see `take_pools`, instead of new ones, which take
        long to allocate. They keep what they hold.

    Raises:
      ValueError: the layout is not the model's, the pools are not as large as asked for, or there
        is no such back end or attention here.
    """
    expected = config.page_layout(page_layout.page_size, page_layout.dtype)
    if not layers_per_program or min(layers_per_program) < 1:
      raise ValueError(f"layers_per_program: expected numbers >= 1, got {layers_per_program}")
    if page_layout != expected:
      raise ValueError(f"page layout: expected {expected}, got {page_layout}")
    self._config = config
    self._layout = page_layout
    self._target = jax.devices()[0]
    self._inputs = batch_inputs.BatchInputs(
      buckets, self._target, page_size=page_layout.page_size, device_pages=device_pages
    )
    on_gpu = self._target.platform == "gpu"
    attention = choices.attention_on(self._target, attention, config, page_layout)
    self._decode_shares = choices.decode_shares(attention, config)
    self._by_layer = choices.choose_overlap(overlap, io, on_gpu) == "layer"
    self._stack = layer_stack.LayerStack(
      config, params, attention, self._target, layers_per_program=layers_per_program
    )
    self._mover = page_mover.PageMover(page_layout, io, store_io or io, buckets, self._target)
    pools = pools or pools_lib.make(page_layout, device_pages, host_pages, self._target)
    pools_lib.check(pools, page_layout, device_pages, host_pages)
    self._device, self._host = pools
    self._gated: gated_loads.GatedLoads | None = None
    by_layer = choices.layer_loads(io, page_layout, on_gpu)
    if self._by_layer and by_layer in gated_loads.BACKENDS and self._host is not None:
      self._gated = gated_loads.GatedLoads(self._fragments(by_layer, self._host))
    self._watcher, self._clock = watcher.Watcher(), clock.Clock()
    self._aside = self._make_aside(
      choices.loads_aside(io, page_layout, on_gpu),
      choices.backups_aside(store_io or io, page_layout, on_gpu),
    )
    self._evicting: set[int] = set()  # transfer ids of backups under way whose pages are evicted
    self._events: list[protocol.Event] = []  # what happened and was not handed over yet
    self._storage: storage_io.StorageIo | None = None
    if store is not None:
      self._storage = storage_io.StorageIo(
        store, host_tier.page_bytes(self._need_host()), page_size=self._layout.page_size,
        now_s=self._clock.now_s, post=self._watcher.post,
      )  # fmt: skip
    self._compilations = programs.CompileCounter()
    self._compiled_before = 0

  @property
  def device_pool(self) -> io_backend.DevicePool:
    """The pool as of the last launch; hold no view of it across one."""
    return self._device

  @property
  def host_pool(self) -> io_backend.HostPool | None:
    """The pool as of the last launch; hold no view of it across one."""
    return self._host

  def take_pools(self) -> pools_lib.Pools:
    """Hands the pools over to another executor; this one can do nothing until it has them again.

    Raises:
      RuntimeError: something is under way, or has not been waited for.
    """
    if self._watcher.is_busy or self._events:
      raise RuntimeError("take_pools: expected nothing under way, got events that are to come")
    pools = self._device, self._host
    self._device, self._host = (), None
    return pools

  def give_pools(self, pools: pools_lib.Pools) -> None:
    """Gives back the pools that were taken; they have not moved meanwhile."""
    self._device, self._host = pools

  @property
  def buckets(self) -> buckets_lib.Buckets:
    """The padded shapes."""
    return self._inputs.buckets

  @property
  def decode_shares(self) -> int:
    """Rows of a decode batch that read the pages which they have in common once."""
    return self._decode_shares

  @property
  def recompiles(self) -> int:
    """Compilations after the warm-up."""
    return self._compilations.count - self._compiled_before

  @property
  def warmup_compilations(self) -> int:
    """Compilations of the last warm-up; programs that the process had already do not count."""
    return self._compiled_before

  def now_s(self) -> float:
    """Seconds since the construction or the last `restart_clock`."""
    return self._clock.now_s()

  def restart_clock(self) -> None:
    """Sets `now_s` to 0, for a run that starts now."""
    self._clock.restart()

  def warmup(self, progress: warm_up.Progress | None = None, threads: int | None = None) -> None:
    """Compiles every program before the first step; all pools stay zero.

    Args:
      progress: is told how far it is.
      threads: that compile; None: one for each processor.

    Raises:
      ValueError: less than one thread.
    """
    beside = self._by_layer and self._gated is None
    slots, count = self._put((np.zeros(self.buckets.table_pages, np.int32), np.int32(0)))
    warm = warm_up.WarmUp(
      (self._device, self._host), inputs=self._inputs, stack=self._stack, mover=self._mover,
      gated=self._gated, staged=self._aside.staged,
      nothing=(count, slots, slots) if beside else None,
    )  # fmt: skip
    try:
      with self._compilations:
        warm.run(progress, threads)
    finally:
      self._device, self._host = warm.pools
    self._compiled_before = self._compilations.count
    self.restart_clock()

  def register(
    self,
    request_id: int,
    sampling: protocol.SamplingParams,
    forced_output_ids: np.ndarray | None,
  ) -> None:
    """Announces a request. Forced outputs are for simulation: here the model answers."""
    del forced_output_ids
    self._inputs.register(request_id, sampling)

  def release(self, request_id: int) -> None:
    """Forgets a request."""
    self._inputs.release(request_id)

  def launch(self, work: protocol.StepWork) -> None:
    """Enqueues a step.

    Raises:
      ValueError: a transfer without a host tier, or more decodes or pages than the buckets hold.
    """
    step = RunningStep(
      step_id=work.step_id,
      started_s=self.now_s(),
      waits=any(prefill.waits_for for prefill in work.prefills),
      near_tie=sampling_lib.NEAR_TIE[self._config.dtype],
    )
    with self._compilations, jax.transfer_guard_host_to_device("disallow"):
      for backup in work.backups:
        if not self._aside.takes(backup):
          self._launch_backup(backup)
      loads = self._put_aside(work)
      self._wait_for_aside(work, step)
      if not self._rides(work):
        for load in loads:
          self._launch_load(load, step)
        loads = ()
      joint: list[batch_inputs.Inputs] | None = None
      if work.prefills:
        prefills = self._inputs.prefills(work.prefills)
        if work.decodes and not loads and self._inputs.go_with_decodes(prefills):
          joint, step.joint = prefills, True
        else:
          xs = self._forward([batch for batch, *_ in prefills], loads, step)
          self._finish_prefills(xs, prefills, step)
          loads = ()
      if work.decodes:
        self._launch_decodes(work.decodes, work.decode_steps, loads, step, joint)
    if work.computes:
      self._watcher.add(step.block, lambda: step.done(self.now_s()))
    for backup in work.backups:  # last: their thread takes Python from this one, and nobody waits
      if self._aside.takes(backup):
        self._aside.start_backup(backup)

  def launch_storage(self, work: protocol.StorageWork) -> None:
    """Starts work of the storage tier in its threads.

    Raises:
      ValueError: there is no store.
    """
    if self._storage is None:
      raise ValueError("work of a storage tier: there is no store")
    self._watcher.expect(2 if isinstance(work, protocol.SpillWork) else 1)
    self._storage.submit(work)

  def flush_storage(self) -> None:
    """See `protocol.Executor`."""
    if self._storage is not None:
      self._storage.flush()

  def close(self) -> None:
    """Ends the threads of the storage tier, which use the host pool's memory."""
    if self._storage is not None:
      self._storage.close()

  def wait(self, until_s: float | None) -> list[protocol.Event]:
    """See `protocol.Executor`.

    Raises:
      RuntimeError: nothing is under way and there is no time limit: it would wait for ever.
    """
    while not self._events:
      if not self._take_in(None if until_s is None else max(until_s - self.now_s(), 0.0)):
        break
    events, self._events = self._events, []
    return events

  def _take_in(self, timeout_s: float | None) -> bool:
    """Takes in what has happened, after waiting for it; False when the time is over first."""
    happened = self._watcher.wait(timeout_s)
    for one in happened:
      event = self._arrived(one) if isinstance(one, watcher.Internal) else one
      if event is None:
        continue
      if isinstance(event, protocol.LoadDone):
        self._aside.taken(event.transfer_id)
      self._events.append(event)
    return bool(happened)

  def _wait_for_aside(self, work: protocol.StepWork, step: RunningStep) -> None:
    """Lets no compute begin before the loads that it reads have come, where no stream does.

    Decodes of the step wait as well: they come behind its prefills, or in one pass with them.
    """
    reads = {transfer_id for prefill in work.prefills for transfer_id in prefill.waits_for}
    if not self._aside.any_under_way(reads):
      return
    while self._aside.any_under_way(reads):
      self._take_in(None)
    step.held_s = self.now_s() - step.started_s

  def _arrived(self, part: watcher.Internal) -> protocol.LoadDone | None:
    """Launches the second half of a part of a parked load."""
    with self._compilations, jax.transfer_guard("disallow"):
      self._device, arrived = self._aside.spread(part, self._device)
    done = protocol.LoadDone(arrived.transfer_id, self._clock.at_s(arrived.at_s))
    return done if arrived.is_last else None

  def _rides(self, work: protocol.StepWork) -> bool:
    """Whether the loads of a step are launched layer by layer, with its compute."""
    if self._gated is not None:  # the compute waits at every layer: not for what it does not read
      return bool(work.prefills)
    return self._by_layer and work.computes

  def _put_aside(self, work: protocol.StepWork) -> tuple[protocol.LoadWork, ...]:
    """Starts the parked loads beside the step, if that can be; the other loads.

    Pages that a backup under way evicts may be those of a load: then it waits its turn.
    """
    if not self._aside.takes_loads or self._evicting:
      return work.loads
    parked = set(work.parked_loads)
    for load in work.loads:
      if load.transfer_id in parked:
        self._aside.start_load(load)
    return tuple(load for load in work.loads if load.transfer_id not in parked)

  def _launch_backup(self, work: protocol.BackupWork) -> None:
    if work.evicts:
      self._evicting.add(work.transfer_id)
    pools = self._device, self._need_host()
    for host in self._mover.store(*pools, work.device_slots, work.host_slots):
      self._host = host

    def done() -> protocol.Event:
      self._evicting.discard(work.transfer_id)
      return protocol.BackupDone(work.transfer_id, self.now_s())

    self._watcher.add(self._block_on_host, done)

  def _launch_load(self, work: protocol.LoadWork, step: RunningStep) -> None:
    self._move_in(work.host_slots, work.device_slots)

    def done() -> protocol.Event:
      step.stall_end_s = self.now_s()
      return protocol.LoadDone(work.transfer_id, step.stall_end_s)

    self._watcher.add(programs.marker(self._device[-1]).block_until_ready, done)

  def _move_in(self, host_slots: np.ndarray, device_slots: np.ndarray) -> None:
    """Loads pages, all layers at once."""
    self._device = self._mover.load(self._need_host(), self._device, host_slots, device_slots)

  def _finish_prefills(
    self, xs: Sequence[jax.Array], prefills: Sequence[batch_inputs.Inputs], step: RunningStep
  ) -> None:
    """The heads of those that sample, behind all layers."""
    for x, (batch, draws, request_ids) in zip(xs, prefills, strict=True):
      if any(request_id is not None for request_id in request_ids):
        _, sampled = self._stack.head(x, batch.lengths, draws)
        step.add_result(request_ids, sampled)
      else:
        step.block = programs.marker(x).block_until_ready
    results = step.results

    def done() -> None:
      step.prefill_end_s = self.now_s()
      step.take(results)

    self._watcher.add(step.block, done, gives_event=False)

  def _launch_decodes(
    self,
    works: Sequence[protocol.DecodeWork],
    decode_steps: int,
    loads: Sequence[protocol.LoadWork],
    step: RunningStep,
    joint: Sequence[batch_inputs.Inputs] | None = None,
  ) -> None:
    """All decode steps, the loads beside them; prefills in one pass with the first of them."""
    largest = self.buckets.decode_requests[-1]
    for first in range(0, len(works), largest):
      some = works[first : first + largest]
      batch, draws, request_ids = self._inputs.decodes(some, decode_steps)
      spread = load_shares.spread(loads, decode_steps)
      loads = ()
      for offset in range(decode_steps):
        last = offset == decode_steps - 1
        if joint is not None:
          with_prefill = [*(one for one, *_ in joint), batch]
          (*xs, x), self._device = self._stack.run_joint(self._device, with_prefill)
          self._finish_prefills(xs, joint, step)
          joint = None
        else:
          (x,) = self._forward([batch], spread[offset], step, completes=last)
        token_ids, sampled = self._stack.head(x, batch.lengths, draws)
        step.add_result(request_ids, sampled)
        if not last:
          self._watcher.add(step.block, step.take, gives_event=False)
          batch, draws = packed_rows.advance(batch, draws, token_ids)
      step.decode_read_tokens += self._read_tokens(some, decode_steps)

  def _read_tokens(self, works: Sequence[protocol.DecodeWork], decode_steps: int) -> int:
    """Tokens whose KV the decode steps of a batch read; each has one more in every row."""
    first = shared_reads.read_tokens(
      [work.page_table for work in works], [work.position + 1 for work in works],
      width=self._decode_shares, page_size=self._layout.page_size,
    )  # fmt: skip
    return decode_steps * first + len(works) * decode_steps * (decode_steps - 1) // 2

  def _forward(
    self,
    batches: Sequence[layer_stack.Batch],
    loads: Sequence[protocol.LoadWork],
    step: RunningStep,
    *,
    completes: bool = True,
  ) -> list[jax.Array]:
    """[B, T, hidden] of each batch; the pools take its KV, and what is loaded beside it.

    The events of the loads are arranged, if this is the last part of them.
    """
    if not loads:
      xs, self._device = self._stack.run(self._device, batches)
      return xs
    ending = loads if completes else ()
    reached = lambda layer, pool: self._watch_loads(layer, pool, ending, step)
    if self._gated is not None:
      share, _ = load_shares.cut(loads, [1], sum(len(load.host_slots) for load in loads))
      gate = self._gated.begin(*share)
      step.stalled_s = self._gated.stalled_s
      xs, self._device = self._stack.run(self._device, batches, gate=gate, reached=reached)
      return xs
    host, largest = self._need_host(), self.buckets.table_pages
    weights = [batch.token_ids.size for batch in batches]
    *shares, rest = load_shares.cut(loads, weights, largest)
    self._move_in(*rest)
    lists: list[layer_stack.LoadLists] = []
    for share in shares:
      padded = np.zeros((2, largest), np.int32)
      padded[:, : len(share.host_slots)] = share
      lists.append(self._put((np.int32(len(share.host_slots)), padded[0], padded[1])))
    self._device = self._stack.load_first(self._device, host, lists)
    xs, self._device = self._stack.run(
      self._device, batches, host=host, lists=lists, reached=reached
    )
    return xs

  def _watch_loads(
    self,
    layer: int,
    pool: jax.Array,
    loads: Sequence[protocol.LoadWork],
    step: RunningStep,
  ) -> None:
    """Of loads layer by layer: with the first layer the stall ends, with the last the loads do.

    Gates measure stalls themselves.
    """
    first = layer == 0 and self._gated is None
    last = layer == len(self._device) - 1
    if not first and not last:
      return
    block = programs.marker(pool).block_until_ready

    def begun() -> None:
      step.stall_end_s = self.now_s()

    if first:
      self._watcher.add(block, begun, gives_event=False)
    if last:
      for load in loads:
        done = lambda load=load: protocol.LoadDone(load.transfer_id, self.now_s())
        self._watcher.add(block, done)

  def _block_on_host(self) -> None:
    """Returns when all backups launched so far, and perhaps later ones, have been written."""
    while True:
      host = self._need_host()
      try:
        host.block_until_ready()
      except RuntimeError:
        if not host.is_deleted():  # else a later backup took it over just now: wait for that one
          raise
      else:
        return

  def _put(self, tree: Any) -> Any:
    return jax.device_put(tree, self._target)

  def _need_host(self) -> jax.Array:
    if self._host is None:
      raise ValueError("a load or a backup: there is no host tier")
    return self._host

  def _make_aside(self, loads: str | None, backups: str | None) -> transfers_aside.TransfersAside:
    host = self._host
    if host is None:
      loads = backups = None
    staged = lambda: staged_loads.StagedLoads(
      self._layout, self._need_host(), self._target, table_pages=self.buckets.table_pages
    )
    return transfers_aside.TransfersAside(
      loads, backups, fragments=lambda way: self._fragments(way, self._need_host()), staged=staged,
      events=self._watcher, now_s=self._clock.now_s,
    )  # fmt: skip

  def _fragments(self, backend: str, host: io_backend.HostPool) -> fragment_copies.FragmentCopies:
    return fragment_copies.FragmentCopies(self._layout, backend, self._device, host)
