"""Two back ends as one: loads by the one, stores by the other."""

import jax

from strata_jax.tiers import io_auto, io_backend, layout


class PairIo:
  """`IoBackend` whose directions go to different back ends."""

  def __init__(self, loads: io_backend.IoBackend, stores: io_backend.IoBackend) -> None:
    """Takes the back end of loads and that of stores, of the same layout."""
    self.name = f"{loads.name}/{stores.name}"
    self._loads = loads
    self._stores = stores

  def load(
    self,
    host: io_backend.HostPool,
    device: io_backend.DevicePool,
    host_slots: io_backend.Slots,
    device_slots: io_backend.Slots,
    count: io_backend.Count,
  ) -> io_backend.DevicePool:
    """See `IoBackend.load`."""
    return self._loads.load(host, device, host_slots, device_slots, count)

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
    return self._loads.load_layer(host, device_layer, layer, host_slots, device_slots, count)

  def store(
    self,
    device: io_backend.DevicePool,
    host: io_backend.HostPool,
    device_slots: io_backend.Slots,
    host_slots: io_backend.Slots,
    count: io_backend.Count,
  ) -> io_backend.HostPool:
    """See `IoBackend.store`."""
    return self._stores.store(device, host, device_slots, host_slots, count)


def make_io(load: str, store: str, page_layout: layout.PageLayout) -> io_backend.IoBackend:
  """The back ends of both directions by name; one back end if they are the same.

  Raises:
    ValueError: see `io_auto.make_io_backend`.
  """
  loads = io_auto.make_io_backend(load, page_layout)
  if store == load:
    return loads
  return PairIo(loads, io_auto.make_io_backend(store, page_layout))
