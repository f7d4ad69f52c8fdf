"""The `reference` back end: jnp on CPU devices, the meaning of all the others."""

import functools

import jax

from strata_jax.pallas_kernels.fragment_io import reference
from strata_jax.tiers import io_backend, io_checks, layout

_load = jax.jit(reference.load, donate_argnums=1)
_load_layer = jax.jit(reference.load_layer, donate_argnums=1)


@functools.cache
def _store(host_sharding: jax.sharding.Sharding | None):
  return jax.jit(reference.store, donate_argnums=1, out_shardings=host_sharding)


class ReferenceIo:
  """`IoBackend` in jnp, for CPU devices only.

  On a GPU XLA would copy the whole host pool to the device in every call, so the factory refuses
  it there. On the CPU both directions write in place: the donated pool keeps its
  `unsafe_buffer_pointer()` as long as no numpy view of it is alive.
  """

  name = "reference"

  def __init__(self, page_layout: layout.PageLayout) -> None:
    self.layout = page_layout

  def load(
    self,
    host: io_backend.HostPool,
    device: io_backend.DevicePool,
    host_slots: io_backend.Slots,
    device_slots: io_backend.Slots,
    count: io_backend.Count,
  ) -> io_backend.DevicePool:
    """See `IoBackend.load`. Raises ValueError on pools or slots of another shape or dtype."""
    io_checks.check_pools(self.layout, host, device)
    io_checks.check_slots(host_slots, device_slots)
    return _load(host, tuple(device), host_slots, device_slots, count)

  def load_layer(
    self,
    host: io_backend.HostPool,
    device_layer: jax.Array,
    layer: int,
    host_slots: io_backend.Slots,
    device_slots: io_backend.Slots,
    count: io_backend.Count,
  ) -> jax.Array:
    """See `IoBackend.load_layer`. One compiled program serves all layers."""
    io_checks.check_layer(self.layout, host, device_layer, layer)
    io_checks.check_slots(host_slots, device_slots)
    return _load_layer(host, device_layer, layer, host_slots, device_slots, count)

  def store(
    self,
    device: io_backend.DevicePool,
    host: io_backend.HostPool,
    device_slots: io_backend.Slots,
    host_slots: io_backend.Slots,
    count: io_backend.Count,
  ) -> io_backend.HostPool:
    """See `IoBackend.store`. Raises ValueError on pools or slots of another shape or dtype."""
    io_checks.check_pools(self.layout, host, device)
    io_checks.check_slots(host_slots, device_slots)
    sharding = io_checks.sharding_of(host)
    return _store(sharding)(tuple(device), host, device_slots, host_slots, count)
