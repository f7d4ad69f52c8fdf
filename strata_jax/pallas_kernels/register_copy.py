"""Copies through registers, 16 bytes a lane, in PTX: what the mover runs on a GPU.

The bytes of all fragments of a call, one fragment after the other, are cut into units of 16
bytes; a tile is what one warpgroup moves in one step. Each of its warps first issues all its
loads, then all its stores. With 1,024 threads and 4 loads a lane 64 KiB an SM are in flight; the
latency of PCIe, 2.1 us, asks for 105 KiB in all.

A fragment may have any whole number of units. Where the 32 lanes of a warp always share a
fragment its slots are looked up once, else lane by lane.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

UNIT_BYTES = 16
_LANES = 32
_WARPS = 4  # a warpgroup
_THREADS = _LANES * _WARPS
_SCALAR = plgpu.Layout.WG_SPLAT()

# `.cs` evicts the written bytes first: they would push the page tables of host memory out of L2.
_LOAD_UNIT = (
  "{ .reg .pred p; setp.ne.b32 p, $5, 0;"
  " @p ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4]; }"
)
_STORE_UNIT = "st.global.cs.v4.b32 [$0], {$1, $2, $3, $4};"
_LOAD_SLOT = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }"

Slots = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegisterCopy:
  """Moves between a page-first pool and layer-first pools.

  Attributes:
    fragment_bytes: bytes of a fragment, a multiple of 16.
    pool_layers: layers of the page-first pool.
    moved_layers: layers that one call moves: all, or one whose index is data.
    to_layers: True from page-first to layer-first, False back.
    loads_in_flight: loads that a lane issues before it stores, 8 at most.
  """

  fragment_bytes: int
  pool_layers: int
  moved_layers: int
  to_layers: bool
  loads_in_flight: int

  @property
  def units(self) -> int:
    """Units a fragment."""
    return self.fragment_bytes // UNIT_BYTES

  @property
  def lane_wise(self) -> bool:
    """Whether the lanes of a warp may lie in different fragments."""
    tile = self.loads_in_flight * _LANES
    return self.units % tile != 0 and (tile % self.units != 0 or self.units % _LANES != 0)

  @property
  def unroll(self) -> int:
    """Units of a lane and tile; lane-wise slots need registers, too."""
    return min(4, self.loads_in_flight) if self.lane_wise else self.loads_in_flight

  @property
  def slots_a_lane(self) -> int:
    """Fragments that the units of one lane and tile may lie in."""
    return self.unroll if self.lane_wise else max(1, self.unroll * _LANES // self.units)

  @property
  def tile_units(self) -> int:
    return _WARPS * self.unroll * _LANES

  def scratch_types(self) -> list:
    """Shared memory for the address of every layer's pool."""
    return [plgpu.SMEM((2 * self.moved_layers,), jnp.int32)]

  def total(self, count: jax.Array) -> jax.Array:
    """Units of `count` pages."""
    return count * (self.moved_layers * self.units)

  def tiles(self, count: jax.Array) -> jax.Array:
    return jax.lax.div(self.total(count) + (self.tile_units - 1), jnp.int32(self.tile_units))

  def prepare(self, layer_first: Sequence[jax.Ref], table: jax.Ref) -> None:
    """Writes the address of every layer's pool to shared memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (1 + len(layer_first)))
    def write_table(_, table, *pools):
      # All threads of all warpgroups write the same: each sees it after its own barrier.
      for layer, pool in enumerate(pools):
        entry = _add(_address(table), _const(8 * layer, 64))
        utils.inline_ptx("st.shared.b64 [$0], $1;", entry, _address(pool))
      utils.warpgroup_barrier()

    write_table(table, *layer_first)

  def look_up(
    self, tile: jax.Array, total: jax.Array, page_slots: jax.Ref, layer_slots: jax.Ref
  ) -> Slots:
    """The slots of this lane's fragments in a tile; entries beyond the list are not read."""
    result = plgpu.ShapeDtypeStruct(
      (self.slots_a_lane * _THREADS,), jnp.int32, layout=self._slot_layout
    )

    @plgpu.inline_mgpu(
      arg_types=(_SCALAR, _SCALAR, plgpu.RefType(), plgpu.RefType()),
      return_type=(result, result),
    )
    def read_slots(_, tile, total, *lists):
      units = self._first_unit_of_fragments(_scalar(tile))
      valid = [_flag(unit, _scalar(total)) for unit in units]
      pages = [_div(unit, self.units * self.moved_layers) for unit in units]
      found = []
      for slots in lists:
        values = []
        for page, ok in zip(pages, valid, strict=True):
          entry = _add(_address(slots), _mul(_wide(page), _const(4, 64)))
          value = utils.inline_ptx(_LOAD_SLOT, entry, ok, result_types=_int(32))
          values.append(vector.broadcast(ir.VectorType.get((1,), _int(32)), value))
        found.append(
          mgpu.FragmentedArray(
            _registers=np.array(values, object),
            _layout=self._slot_layout.to_mgpu(),
            _is_signed=True,
          )
        )
      return tuple(found)

    return read_slots(tile, total, page_slots, layer_slots)

  def move(
    self,
    tile: jax.Array,
    total: jax.Array,
    layer: jax.Array,
    slots: Slots,
    page_first: jax.Ref,
    layer_first: Sequence[jax.Ref],
    table: jax.Ref,
  ) -> None:
    """Moves the units of one tile."""
    del layer_first  # their addresses are in the table

    @plgpu.inline_mgpu(
      arg_types=(*(_SCALAR,) * 3, *(self._slot_layout,) * 2, *(plgpu.RefType(),) * 2)
    )
    def copy(_, tile, total, layer, page_slots, layer_slots, page_first, table):
      tile, total = _scalar(tile), _scalar(total)
      pages, layers = [], []
      for first, page_slot, layer_slot in zip(
        self._first_unit_of_fragments(tile), _values(page_slots), _values(layer_slots), strict=True
      ):
        moved = _rem(_div(first, self.units), self.moved_layers)
        in_page = _add(moved, _scalar(layer))  # one of the two is always 0
        row = _add(_mul(_wide(page_slot), _const(self.pool_layers, 64)), _wide(in_page))
        pages.append(_add(_address(page_first), self._bytes(row)))
        pool = utils.inline_ptx(
          "ld.shared.b64 $0, [$1];",
          _add(_address(table), _mul(_wide(moved), _const(8, 64))),
          result_types=_int(64),
        )
        layers.append(_add(pool, self._bytes(_wide(layer_slot))))
      sources, targets = (pages, layers) if self.to_layers else (layers, pages)
      loaded = []
      for step, (unit, offset) in enumerate(self._units_of_lane(tile)):
        fragment = self._fragment_of_step(step)
        address = _add(sources[fragment], offset)
        values = utils.inline_ptx(
          _LOAD_UNIT,
          address,
          _flag(unit, total),
          result_types=[_int(32)] * 4,
          has_side_effects=True,  # keeps all loads before all stores
        )
        loaded.append((unit, _add(targets[fragment], offset), values))
      for unit, address, values in loaded:
        ok = arith.cmpi(arith.CmpIPredicate.ult, unit, total)
        utils.inline_ptx(_STORE_UNIT, address, *values, predicate=ok)

    copy(tile, total, layer, *slots, page_first, table)

  @property
  def _slot_layout(self):
    return plgpu.Layout.WG_STRIDED((self.slots_a_lane * _THREADS,), vec_size=1)

  def _first_unit(self, tile: ir.Value) -> ir.Value:
    """The first unit of this warp in a tile of its warpgroup."""
    warp = _rem(_div(_thread(), _LANES), _WARPS)
    tile_of_warp = _add(_mul(tile, _const(_WARPS)), warp)
    return _mul(tile_of_warp, _const(self.unroll * _LANES))

  def _first_unit_of_fragments(self, tile: ir.Value) -> list[ir.Value]:
    """One unit of every fragment that this lane takes part in."""
    first = self._first_unit(tile)
    if self.lane_wise:
      return [unit for unit, _ in self._units_of_lane(tile)]
    return [_add(first, _const(k * self.units)) for k in range(self.slots_a_lane)]

  def _units_of_lane(self, tile: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
    """Per step: the unit, and where it lies in its fragment in bytes."""
    first, lane = self._first_unit(tile), _rem(_thread(), _LANES)
    placed: list[tuple[ir.Value, ir.Value]] = []
    for step in range(self.unroll):
      unit = _add(first, _add(lane, _const(step * _LANES)))
      if self.lane_wise:
        within = _rem(unit, self.units)
      elif self.slots_a_lane > 1:
        within = _add(lane, _const(step * _LANES % self.units))
      else:
        within = _add(_rem(first, self.units), _add(lane, _const(step * _LANES)))
      placed.append((unit, _mul(_wide(within), _const(UNIT_BYTES, 64))))
    return placed

  def _fragment_of_step(self, step: int) -> int:
    if self.lane_wise:
      return step
    return step * _LANES // self.units if self.slots_a_lane > 1 else 0

  def _bytes(self, fragments: ir.Value) -> ir.Value:
    return _mul(fragments, _const(self.fragment_bytes, 64))


def _int(bits: int) -> ir.Type:
  return ir.IntegerType.get_signless(bits)


def _const(value: int, bits: int = 32) -> ir.Value:
  return arith.constant(_int(bits), value)


def _by_constant(operation: Callable) -> Callable[[ir.Value, int], ir.Value]:
  return lambda value, divisor: operation(value, _const(divisor))


_add, _mul = arith.addi, arith.muli
_div, _rem = _by_constant(arith.divui), _by_constant(arith.remui)


def _wide(value: ir.Value) -> ir.Value:
  return arith.extui(_int(64), value)


def _flag(unit: ir.Value, total: ir.Value) -> ir.Value:
  """1 where the unit exists."""
  return arith.extui(_int(32), arith.cmpi(arith.CmpIPredicate.ult, unit, total))


def _thread() -> ir.Value:
  return arith.index_cast(_int(32), gpu.thread_id(gpu.Dimension.x))


def _scalar(array: mgpu.FragmentedArray) -> ir.Value:
  return array.registers.item()


def _values(array: mgpu.FragmentedArray) -> list[ir.Value]:
  return [vector.extract(register, [], [0]) for register in array.registers.reshape(-1)]


def _address(ref: ir.Value) -> ir.Value:
  return llvm.ptrtoint(_int(64), utils.memref_ptr(ref))
