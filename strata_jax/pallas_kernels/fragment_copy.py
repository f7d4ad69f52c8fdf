"""Copies fragment by fragment through refs: what the mover runs in the interpreter.

The interpreter knows no PTX. These moves have the interface of `RegisterCopy`, so the division of
work, the look-up of slots one step ahead and the count are those that the GPU runs.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

Slots = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FragmentCopy:
  """As `RegisterCopy`, with one fragment a tile."""

  moved_layers: int
  to_layers: bool

  def scratch_types(self) -> list:
    return []

  def total(self, count: jax.Array) -> jax.Array:
    return count * self.moved_layers

  def tiles(self, count: jax.Array) -> jax.Array:
    return self.total(count)

  def prepare(self, layer_first: Sequence[jax.Ref]) -> None:
    del layer_first

  def look_up(
    self, tile: jax.Array, total: jax.Array, page_slots: jax.Ref, layer_slots: jax.Ref
  ) -> Slots:
    page = jnp.where(tile < total, jax.lax.div(tile, jnp.int32(self.moved_layers)), 0)
    return page_slots[page], layer_slots[page]

  def move(
    self,
    tile: jax.Array,
    total: jax.Array,
    layer: jax.Array,
    slots: Slots,
    page_first: jax.Ref,
    layer_first: Sequence[jax.Ref],
  ) -> None:
    page_slot, layer_slot = slots
    moved = jax.lax.rem(tile, jnp.int32(self.moved_layers))
    for index, pool in enumerate(layer_first):

      @pl.when((moved == index) & (tile < total))
      def _(pool=pool):
        if self.to_layers:
          pool[layer_slot] = page_first[page_slot, moved + layer]
        else:
          page_first[page_slot, moved + layer] = pool[layer_slot]
