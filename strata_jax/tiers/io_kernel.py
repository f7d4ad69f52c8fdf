"""The `kernel` back end: fragments moved by a Pallas kernel on a few SMs."""

import functools

import jax
import numpy as np

from strata_jax.pallas_kernels.fragment_io import api
from strata_jax.tiers import io_backend, io_checks, layout


@functools.cache
def _on_device(number: int) -> jax.Array:
  """A number that is not sent to the device with every call."""
  return jax.device_put(np.int32(number))


class KernelIo:
  """`IoBackend` through `fragment_io`: any page size at link speed, 2 SMs busy while it runs.

  One program a bucket and direction, and one for all layers of `load_layer`. All methods can be
  traced inside a larger program; `store` then needs the out_shardings that `fragment_io.api` tells.
  """

  name = "kernel"

  def __init__(
    self, page_layout: layout.PageLayout, config: api.FragmentIoConfig | None = None
  ) -> None:
    self.layout = page_layout
    self.config = config or api.FragmentIoConfig()
    load = functools.partial(api.load_fragments, config=self.config)
    self._load = jax.jit(load, donate_argnums=1)
    self._load_layer = jax.jit(
      lambda host, pool, layer, *slots: load(host, (pool,), *slots, layer=layer)[0],
      donate_argnums=1,
    )
    self._store = functools.cache(self._make_store)

  def _make_store(self, sharding: jax.sharding.Sharding | None):
    store = functools.partial(api.store_fragments, config=self.config)
    return jax.jit(store, donate_argnums=1, out_shardings=sharding)

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
    return self._load(host, tuple(device), host_slots, device_slots, count)

  def load_layer(
    self,
    host: io_backend.HostPool,
    device_layer: jax.Array,
    layer: int,
    host_slots: io_backend.Slots,
    device_slots: io_backend.Slots,
    count: io_backend.Count,
  ) -> jax.Array:
    """See `IoBackend.load_layer`."""
    io_checks.check_layer(self.layout, host, device_layer, layer)
    io_checks.check_slots(host_slots, device_slots)
    which = _on_device(layer) if isinstance(layer, int) else layer  # data: one program for all
    return self._load_layer(host, device_layer, which, host_slots, device_slots, count)

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
    store = self._store(io_checks.sharding_of(host))
    return store(tuple(device), host, device_slots, host_slots, count)
