"""The kernel that moves fragments between a page-first pool and layer-first pools.

A few large blocks of 1,024 threads share the fragments of a list of pages. The pool that is
written is a Ref and changes in place; either pool may lie in pinned host memory.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from strata_jax import validation
from strata_jax.pallas_kernels import fragment_copy, register_copy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """What a mover is compiled for.

  Attributes:
    fragment_bytes: bytes of one page in one layer, a multiple of 16.
    pool_layers: layers of the page-first pool.
    moved_layers: `pool_layers` to move whole pages, 1 to move a layer that is given as data.
    bucket: length of the lists of slots.
    to_layers: True from page-first to layer-first, False back.
    blocks: thread blocks, at most one an SM at a time.
    loads_in_flight: loads of 16 bytes that a lane issues before it stores.
    warpgroups: groups of 128 threads a block.
  """

  fragment_bytes: int
  pool_layers: int
  moved_layers: int
  bucket: int
  to_layers: bool
  blocks: int
  loads_in_flight: int
  warpgroups: int = 8

  def __post_init__(self) -> None:
    for field in ("fragment_bytes", "pool_layers", "moved_layers", "blocks"):
      validation.check_int(self, field, minimum=1)
    validation.check_int(self, "bucket", minimum=0)
    validation.check_int(self, "warpgroups", minimum=1, maximum=8)
    validation.check_choice(self, "loads_in_flight", (1, 2, 4, 8))
    if self.fragment_bytes % register_copy.UNIT_BYTES:
      validation.fail(self, "fragment_bytes", "a multiple of 16", self.fragment_bytes)
    if self.moved_layers not in (1, self.pool_layers):
      validation.fail(self, "moved_layers", f"1 or {self.pool_layers}", self.moved_layers)
    units = self.bucket * self.moved_layers * self.fragment_bytes // register_copy.UNIT_BYTES
    if units > 2**31 - 2**20:  # unit indices are int32, and run a step ahead
      validation.fail(self, "bucket", "at most 31 GiB a call", self.bucket)


def make_mover(work: Work, interpret: plgpu.InterpretGPUParams | None = None) -> Callable:
  """Builds the kernel for `work`.

  Returns:
    A function of (count int32 [1], layer int32 [1], page_slots int32 [bucket], layer_slots int32
    [bucket], page_first [pages, pool_layers, *fragment], *layer_first [pages, *fragment]). The
    written side is a Ref. Only the first `count` entries of the lists are read (at most all of
    them), only their fragments are moved. `layer` counts only if `moved_layers` is 1.
  """
  if interpret is None:
    moves = register_copy.RegisterCopy(
      fragment_bytes=work.fragment_bytes,
      pool_layers=work.pool_layers,
      moved_layers=work.moved_layers,
      to_layers=work.to_layers,
      loads_in_flight=work.loads_in_flight,
    )
  else:
    moves = fragment_copy.FragmentCopy(moved_layers=work.moved_layers, to_layers=work.to_layers)

  def move_fragments(count, layer, page_slots, layer_slots, page_first, *rest):
    layer_first, scratch = rest[: work.moved_layers], rest[work.moved_layers + 1 :]
    # Neighbouring tiles go to different blocks, then to different warpgroups.
    worker = lax.axis_index("block") + work.blocks * lax.axis_index("warpgroup")
    workers = work.blocks * work.warpgroups
    pages = lax.clamp(jnp.int32(0), count[0], jnp.int32(work.bucket))
    total, tiles = moves.total(pages), moves.tiles(pages)
    steps = lax.div(tiles - worker + (workers - 1), jnp.int32(workers))
    which = layer[0] if work.moved_layers == 1 else jnp.int32(0)
    moves.prepare(layer_first, *scratch)

    def step(index, slots):
      tile = worker + index * workers
      following = moves.look_up(tile + workers, total, page_slots, layer_slots)
      moves.move(tile, total, which, slots, page_first, layer_first, *scratch)
      return following

    lax.fori_loop(0, steps, step, moves.look_up(worker, total, page_slots, layer_slots))

  return plgpu.kernel(
    move_fragments,
    out_type=jax.ShapeDtypeStruct((1,), jnp.int32),  # unused: a kernel must return something
    scratch_types=moves.scratch_types(),
    grid=(work.blocks,),
    grid_names=("block",),
    num_threads=work.warpgroups,
    thread_name="warpgroup",
    # Safe: no memory is both read and written by a kernel, except the table of addresses, which
    # has its own barrier.
    compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    interpret=interpret,
  )
