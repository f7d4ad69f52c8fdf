"""Compiles every program of an executor before the first step, most of them in threads."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax

from strata_jax.executors import (
  batch_inputs,
  gated_loads,
  layer_stack,
  packed_rows,
  page_mover,
  programs,
  staged_loads,
)
from strata_jax.executors import pools as pools_lib

# progress(programs compiled, programs in all, what was compiled)
Progress = Callable[[int, int, str], None]


class WarmUp:
  """Calls each program once, with inputs that change nothing.

  The programs of compute, which are slow to compile, are compiled before, in threads: their calls
  find them compiled, and show that nothing is left to compile when a step calls them.
  """

  def __init__(
    self,
    pools: pools_lib.Pools,
    *,
    inputs: batch_inputs.BatchInputs,
    stack: layer_stack.LayerStack,
    mover: page_mover.PageMover,
    gated: gated_loads.GatedLoads | None,
    staged: staged_loads.StagedLoads | None,
    nothing: layer_stack.LoadLists | None,
  ) -> None:
    """Takes over the pools.

    Args:
      pools: donated by the calls; `self.pools` are those as of the last one, and stay zero.
      inputs: makes batches of padding.
      stack: has the programs of compute.
      mover: has those of transfers.
      gated: has the gate, if loads run beside the compute behind one.
      staged: has the program of parked loads, if they are staged.
      nothing: a list of no pages, if programs load beside the compute.
    """
    self.pools = pools
    self._inputs, self._stack, self._mover = inputs, stack, mover
    self._gated, self._staged, self._nothing = gated, staged, nothing

  def run(self, progress: Progress | None = None, threads: int | None = None) -> None:
    """Compiles everything.

    Args:
      progress: is told how far it is.
      threads: that compile ahead; None: one for each processor; 1: nothing is compiled ahead.

    Raises:
      ValueError: less than one thread.
    """
    threads = (os.cpu_count() or 1) if threads is None else threads
    if threads < 1:
      raise ValueError(f"threads of a warm-up: expected at least 1, got {threads}")
    ahead = list(self._ahead()) if threads > 1 else []
    jobs = list(self._jobs())
    done, total = 0, len(ahead) + len(jobs)

    def tell(name: str, more: int = 0) -> None:
      nonlocal done
      done += more
      if progress is not None:
        progress(done, total, name)

    if ahead:
      tell(ahead[0][0])
      compile_ahead(ahead, threads, lambda name: tell(name, 1))
    for name, job in jobs:
      tell(name)
      jax.block_until_ready(job())
      done += 1
    tell("done")

  def _ahead(self) -> Iterator[tuple[str, programs.Lower]]:
    """The programs of compute, the slowest first; each once."""
    device, host = self.pools
    buckets, structs = self._inputs.buckets, self._inputs.structs
    for rows, tokens, decodes in buckets.joint_shapes:
      batches = [structs(*shape).batch for shape in ((rows, tokens), (decodes, 1))]
      for lower in self._stack.lower_joint(device, batches):
        yield _joint_name(rows, tokens, decodes), lower
    counts = set()
    for shape in buckets.shapes:
      batch, draws, _ = structs(*shape)
      lowers = [
        *self._stack.lower(device, batch, draws, host, self._nothing),
        lambda shape=shape: self._inputs.lower(*shape),
      ]
      if shape[0] not in counts:
        lowers.append(lambda batch=batch, draws=draws: packed_rows.lower_advance(batch, draws))
      counts.add(shape[0])
      for lower in lowers:
        yield _name(*shape), lower

  def _jobs(self) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls of all programs."""
    buckets = self._inputs.buckets
    for shape in buckets.shapes:
      yield _name(*shape), lambda shape=shape: self._shape(*shape)
    for rows, tokens, decodes in buckets.joint_shapes:
      shapes = (rows, tokens), (decodes, 1)
      yield _joint_name(rows, tokens, decodes), lambda shapes=shapes: self._joint(shapes)
    if self.pools[1] is not None:
      if self._staged is not None:
        yield "parked loads", self._parked
      for pages in buckets.transfer_pages:
        yield f"moves of {pages} pages", lambda pages=pages: self._transfer(pages)

  def _shape(self, rows: int, tokens: int) -> jax.Array:
    batch, draws, _ = self._inputs.padding(rows, tokens)
    device, host = self.pools
    x, device = self._stack.warm(device, batch, host, self._nothing)
    if self._gated is not None:
      device = (self._gated.warm(device[0]), *device[1:])
    self.pools = device, host
    token_ids, _ = self._stack.head(x, batch.lengths, draws)
    packed_rows.advance(batch, draws, token_ids)
    return token_ids

  def _joint(self, shapes: Sequence[tuple[int, int]]) -> Sequence[jax.Array]:
    device, host = self.pools
    batches = [self._inputs.padding(*shape).batch for shape in shapes]
    xs, device = self._stack.run_joint(device, batches, warms=True)
    self.pools = device, host
    return xs

  def _parked(self) -> jax.Array:
    assert self._staged is not None
    device, host = self.pools
    device = self._staged.warm(device)
    self.pools = device, host
    return programs.marker(device[-1])

  def _transfer(self, pages: int) -> jax.Array:
    device, host = self.pools
    assert host is not None
    self.pools = device, host = self._mover.warm(device, host, pages)
    return programs.marker(device[-1])


def compile_ahead(
  lowers: Sequence[tuple[str, programs.Lower]], threads: int, done: Callable[[str], None]
) -> None:
  """Compiles programs in threads; the first error of one is raised at once.

  This thread lowers them meanwhile: that is Python's own work, which threads would not share.

  Args:
    lowers: name and lowering of each, none of them twice: it would be compiled twice.
    threads: how many compile at once.
    done: is handed the name of each that is compiled, in this thread.
  """
  pool = futures.ThreadPoolExecutor(threads, "compile")
  names: dict[futures.Future[jax.stages.Compiled], str] = {}

  def take(timeout_s: float | None) -> None:
    for future in futures.wait(names, timeout_s, futures.FIRST_COMPLETED).done:
      future.result()
      done(names.pop(future))

  try:
    for name, lower in lowers:
      names[pool.submit(lower().compile)] = name
      take(0)
    while names:
      take(None)
  finally:
    pool.shutdown(wait=False, cancel_futures=True)


def _name(rows: int, tokens: int) -> str:
  return f"{rows} x {tokens} tokens"


def _joint_name(rows: int, tokens: int, decodes: int) -> str:
  return f"{_name(rows, tokens)} and {decodes} decodes"
