"""The executor with real pages and a real model, on JAX's default device."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from strata_jax import attention as attention_lib
from strata_jax import config as config_lib
from strata_jax import sampling as sampling_lib
from strata_jax.executors import buckets as buckets_lib
from strata_jax.executors import programs, protocol, storage_io, watcher
from strata_jax.models import llama
from strata_jax.tiers import device as device_tier
from strata_jax.tiers import host as host_tier
from strata_jax.tiers import io_auto, io_backend, layout, page_store

# progress(programs compiled, programs in all, what was compiled)
Progress = Callable[[int, int, str], None]


@dataclasses.dataclass(kw_only=True, slots=True)
class _Registered:
  sampling: protocol.SamplingParams
  outputs: int = 0  # tokens sampled so far: the index of the next draw


@dataclasses.dataclass(kw_only=True, slots=True)
class _Step:
  """A computing step under way."""

  step_id: int
  started_s: float
  waits: bool  # its prefills read pages that its loads write
  loads_end_s: float
  prefill_end_s: float
  results: list[tuple[tuple[int, ...], jax.Array, jax.Array]]  # request ids, ids [B, 1], gaps [B]
  block: Callable[[], object]  # returns when what was launched last is done


class JaxExecutor:
  """Implements `protocol.Executor`.

  A step is launched in the order backups, loads, prefills, decodes; the order in which pages are
  read and written follows from data dependence, since every pool is passed through every program
  that touches it. `launch` only enqueues; a thread beside it waits for each part in that order and
  takes the time at which it was done; `wait` hands the events over.

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
    io: str = "reference",
    attention: str = "xla",
    store: page_store.PageStore | None = None,
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
      attention: the implementation of attention by name.
      store: of the storage tier, with pages as large as the layout's; stays the caller's. With one,
        `close` has to be called before the executor is given up.

    Raises:
      ValueError: the layout is not the model's, or there is no such back end or attention here.
    """
    expected = config.page_layout(page_layout.page_size, page_layout.dtype)
    if page_layout != expected:
      raise ValueError(f"page layout: expected {expected}, got {page_layout}")
    if attention not in attention_lib.IMPLEMENTATIONS:
      names = ", ".join(attention_lib.IMPLEMENTATIONS)
      raise ValueError(f"attention: expected one of {names}, got {attention!r}")
    self._config = config
    self._page_size = page_layout.page_size
    self._buckets = buckets
    self._attention = attention
    self._target = jax.devices()[0]
    self._params = jax.device_put(params, self._target)
    self._io = io_auto.make_io_backend(io, page_layout)
    self._device = device_tier.make_device_pool(page_layout, device_pages, self._target)
    self._host: io_backend.HostPool | None = None
    if host_pages:
      self._host = host_tier.make_host_pool(page_layout, host_pages, self._target)
    self._requests: dict[int, _Registered] = {}
    self._watcher = watcher.Watcher()
    self._storage: storage_io.StorageIo | None = None
    if store is not None:
      self._storage = storage_io.StorageIo(
        store, host_tier.page_bytes(self._need_host()), page_size=self._page_size,
        now_s=self.now_s, post=self._watcher.post,
      )  # fmt: skip
    self._compilations = programs.CompileCounter()
    self._compiled_before = 0
    self._origin_s = time.perf_counter()

  @property
  def device_pool(self) -> io_backend.DevicePool:
    """The pool as of the last launch; hold no view of it across one."""
    return self._device

  @property
  def host_pool(self) -> io_backend.HostPool | None:
    """The pool as of the last launch; hold no view of it across one."""
    return self._host

  @property
  def buckets(self) -> buckets_lib.Buckets:
    """The padded shapes."""
    return self._buckets

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
    return time.perf_counter() - self._origin_s

  def restart_clock(self) -> None:
    """Sets `now_s` to 0, for a run that starts now."""
    self._origin_s = time.perf_counter()

  def warmup(self, progress: Progress | None = None) -> None:
    """Compiles every program by running it on nothing; no page of any pool changes."""
    jobs = list(self._warmup_jobs())
    with self._compilations:
      for index, (name, job) in enumerate(jobs):
        if progress is not None:
          progress(index, len(jobs), name)
        jax.block_until_ready(job())
    if progress is not None:
      progress(len(jobs), len(jobs), "done")
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
    self._requests[request_id] = _Registered(sampling=sampling)

  def release(self, request_id: int) -> None:
    """Forgets a request."""
    self._requests.pop(request_id, None)

  def launch(self, work: protocol.StepWork) -> None:
    """Enqueues a step.

    Raises:
      ValueError: a transfer without a host tier, or more decodes or pages than the buckets hold.
    """
    step = _Step(
      step_id=work.step_id, started_s=self.now_s(), waits=any(p.waits_for for p in work.prefills),
      loads_end_s=0.0, prefill_end_s=0.0, results=[], block=lambda: None,
    )  # fmt: skip
    with self._compilations, jax.transfer_guard("disallow"):
      for backup in work.backups:
        self._launch_backup(backup)
      for load in work.loads:
        self._launch_load(load, step)
      for prefill in work.prefills:
        self._launch_prefill(prefill, step)
      if work.decodes:
        self._launch_decodes(work.decodes, work.decode_steps, step)
    if work.computes:
      self._watcher.add(step.block, lambda: self._finish(step))

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
    return self._watcher.wait(None if until_s is None else max(until_s - self.now_s(), 0.0))

  def _launch_backup(self, work: protocol.BackupWork) -> None:
    host = self._need_host()
    for count, sources, targets in self._page_lists(work.device_slots, work.host_slots):
      host = self._io.store(self._device, host, sources, targets, count)
      self._host = host
    self._watcher.add(
      self._block_on_host, lambda: protocol.BackupDone(work.transfer_id, self.now_s())
    )

  def _launch_load(self, work: protocol.LoadWork, step: _Step) -> None:
    host = self._need_host()
    for count, sources, targets in self._page_lists(work.host_slots, work.device_slots):
      self._device = self._io.load(host, self._device, sources, targets, count)

    def done() -> protocol.Event:
      step.loads_end_s = self.now_s()
      return protocol.LoadDone(work.transfer_id, step.loads_end_s)

    self._watcher.add(programs.marker(self._device[-1]).block_until_ready, done)

  def _launch_prefill(self, work: protocol.PrefillWork, step: _Step) -> None:
    table = self._table([(work.page_table, work.start + len(work.token_ids))], 1)
    start, token_ids = work.start, work.token_ids
    x = lengths = None
    for count, bucket in self._buckets.chunk_pieces(len(token_ids)):
      ids = np.zeros((1, bucket), np.int32)
      ids[0, :count], token_ids = token_ids[:count], token_ids[count:]
      device_ids, starts, lengths = self._put(
        (ids, np.array([start], np.int32), np.array([count], np.int32))
      )
      x = self._forward(device_ids, table, starts, lengths)
      start += count
    if x is None or lengths is None:
      raise ValueError(f"prefill of request {work.request_id}: expected tokens, got none")

    if work.samples:
      draws = self._draws([work.request_id], 1)
      result = self._head(x, lengths, draws)
      step.results.append(((work.request_id,), *result))
      step.block = result[1].block_until_ready
    else:
      step.block = programs.marker(x).block_until_ready

    def done() -> None:
      step.prefill_end_s = self.now_s()

    self._watcher.add(step.block, done, gives_event=False)

  def _launch_decodes(
    self, works: Sequence[protocol.DecodeWork], decode_steps: int, step: _Step
  ) -> None:
    largest = self._buckets.decode_requests[-1]
    for first in range(0, len(works), largest):
      batch = works[first : first + largest]
      rows = buckets_lib.smallest_bucket(len(batch), self._buckets.decode_requests)
      request_ids = tuple(work.request_id for work in batch)
      contexts = [(work.page_table, work.position + decode_steps) for work in batch]
      table = self._table(contexts, rows)
      ids, positions, lengths = np.zeros((3, rows), np.int32)
      ids[: len(batch)] = [work.token_id for work in batch]
      positions[: len(batch)] = [work.position for work in batch]
      lengths[: len(batch)] = 1
      device_ids, device_lengths = self._put((ids[:, None], lengths))
      for offset in range(decode_steps):
        starts = self._put(positions + offset)
        x = self._forward(device_ids, table, starts, device_lengths)
        draws = self._draws(request_ids, rows)
        device_ids, gaps = self._head(x, device_lengths, draws)
        step.results.append((request_ids, device_ids, gaps))
        step.block = gaps.block_until_ready

  def _forward(
    self, token_ids: jax.Array, table: jax.Array, starts: jax.Array, lengths: jax.Array
  ) -> jax.Array:
    """[B, T] ids to [B, T, hidden]; the pools take their KV."""
    x = programs.embed(self._params.embedding, token_ids)
    pools = list(self._device)
    for index, params in enumerate(self._params.layers):
      x, pools[index] = programs.layer(
        params, x, pools[index], table, starts, lengths,
        config=self._config, implementation=self._attention,
      )  # fmt: skip
    self._device = tuple(pools)
    return x

  def _head(
    self, x: jax.Array, lengths: jax.Array, draws: tuple[jax.Array, jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    return programs.head(self._params.head, x, lengths, *draws, config=self._config)

  def _finish(self, step: _Step) -> protocol.StepDone:
    """The event of a computed step; its results are ready."""
    at_s = self.now_s()
    limit = sampling_lib.NEAR_TIE[self._config.dtype]
    tokens: dict[int, list[int]] = {}
    ties: dict[int, list[int]] = {}
    for request_ids, ids, gaps in jax.device_get(step.results):
      for row, request_id in enumerate(request_ids):
        got = tokens.setdefault(request_id, [])
        if gaps[row] < limit:
          ties.setdefault(request_id, []).append(len(got))
        got.append(int(ids[row, 0]))
    stalled = max(step.loads_end_s - step.started_s, 0.0)
    prefill_s = max(step.prefill_end_s - step.started_s, 0.0)
    return protocol.StepDone(
      step_id=step.step_id,
      started_s=step.started_s,
      at_s=at_s,
      tokens={request_id: tuple(got) for request_id, got in tokens.items()},
      prefill_end_s=step.prefill_end_s,
      compute_s=max(prefill_s - stalled, 0.0),
      stall_s=stalled if step.waits else 0.0,
      near_ties={request_id: tuple(at) for request_id, at in ties.items()},
    )

  def _draws(self, request_ids: Sequence[int], rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Temperatures, seeds and output indices of a batch; counts the outputs."""
    temperatures, seeds = np.zeros(rows, np.float32), np.zeros(rows, np.uint32)
    indices = np.zeros(rows, np.int32)
    for row, request_id in enumerate(request_ids):
      request = self._requests[request_id]
      temperatures[row] = request.sampling.temperature
      seeds[row] = request.sampling.seed % 2**32
      indices[row] = request.outputs
      request.outputs += 1
    return self._put((temperatures, seeds, indices))

  def _table(self, contexts: Sequence[tuple[np.ndarray, int]], rows: int) -> jax.Array:
    """Page tables, each with the tokens that it must have room for, padded to [rows, N]."""
    padded = np.zeros((rows, self._buckets.table_pages), np.int32)
    for row, (table, tokens) in enumerate(contexts):
      if tokens > len(table) * self._page_size or len(table) > padded.shape[1]:
        raise ValueError(
          f"page table: expected room for {tokens} tokens in at most {padded.shape[1]} pages, "
          f"got {len(table)} pages of {self._page_size}"
        )
      padded[row, : len(table)] = table
    return self._put(padded)

  def _page_lists(
    self, sources: np.ndarray, targets: np.ndarray
  ) -> Iterator[tuple[jax.Array, jax.Array, jax.Array]]:
    """Count, sources and targets of each piece of a transfer, padded."""
    first = 0
    for count, bucket in self._buckets.transfer_pieces(len(sources)):
      lists = np.zeros((2, bucket), np.int32)
      lists[0, :count] = sources[first : first + count]
      lists[1, :count] = targets[first : first + count]
      first += count
      yield self._put((np.int32(count), lists[0], lists[1]))

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

  def _warmup_jobs(self) -> Iterator[tuple[str, Callable[[], Any]]]:
    for rows, chunk in self._buckets.shapes:
      yield f"{rows} x {chunk} tokens", lambda rows=rows, chunk=chunk: self._warm_shape(rows, chunk)
    if self._host is not None:
      for pages in self._buckets.transfer_pages:
        yield f"moves of {pages} pages", lambda pages=pages: self._warm_transfer(pages)

  def _warm_shape(self, rows: int, chunk: int) -> jax.Array:
    """One layer stands for all; chunks of length 0 write nothing."""
    table = self._table([], rows)
    ids, nothing = self._put((np.zeros((rows, chunk), np.int32), np.zeros(rows, np.int32)))
    x = programs.embed(self._params.embedding, ids)
    x, pool = programs.layer(
      self._params.layers[0], x, self._device[0], table, nothing, nothing,
      config=self._config, implementation=self._attention,
    )  # fmt: skip
    self._device = (pool, *self._device[1:])
    programs.marker(x)
    draws = self._put((np.zeros(rows, np.float32), np.zeros(rows, np.uint32), nothing))
    return self._head(x, nothing, draws)[0]

  def _warm_transfer(self, pages: int) -> jax.Array:
    slots, count = self._put((np.zeros(pages, np.int32), np.int32(0)))
    self._host = self._io.store(self._device, self._need_host(), slots, slots, count)
    self._device = self._io.load(self._host, self._device, slots, slots, count)
    return programs.marker(self._device[-1])
