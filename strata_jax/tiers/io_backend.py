"""The one interface of all ways to move pages between the device pool and the host pool."""

from typing import Protocol

import jax

DevicePool = tuple[jax.Array, ...]  # a layer each: [pages, 2, page_size, kv_heads, head_dim]
HostPool = jax.Array  # pinned_host: [pages, layers, 2, page_size, kv_heads, head_dim]
Slots = jax.Array  # int32 [bucket]; entries from `count` on are never read
Count = jax.Array  # int32 []


class IoBackend(Protocol):
  """Moves `count` pages between slots of the two pools, converting the layout on the way.

  The pool that is written is donated and returned: same buffer, new contents; every other page of
  it keeps its bytes. The pool that is read is not touched. Slots of the written side are distinct;
  slots of the read side may repeat. Calls are asynchronous as all of JAX; results are ordered by
  data dependence alone.
  """

  name: str

  def load(
    self, host: HostPool, device: DevicePool, host_slots: Slots, device_slots: Slots, count: Count
  ) -> DevicePool:
    """Host to device, all layers."""
    ...

  def load_layer(
    self,
    host: HostPool,
    device_layer: jax.Array,
    layer: int,
    host_slots: Slots,
    device_slots: Slots,
    count: Count,
  ) -> jax.Array:
    """Host to device, the fragments of one layer (for layer-wise overlap)."""
    ...

  def store(
    self, device: DevicePool, host: HostPool, device_slots: Slots, host_slots: Slots, count: Count
  ) -> HostPool:
    """Device to host, all layers."""
    ...
