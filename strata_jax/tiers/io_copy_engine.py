"""The `copy_engine` back end: whole pages by DMA, layouts converted on the device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.pallas_kernels.layout_convert import api
from strata_jax.tiers import cuda_copies, io_backend, io_checks, layout

DEFAULT_STAGING_BYTES = 256 << 20


class CopyEngineIo:
  """`IoBackend` by `cudaMemcpyBatchAsync`: no SM works while bytes cross the link.

  `load` and `store` copy whole page-first pages from or to a staging buffer in device memory, in
  as many rounds as it takes, and convert each round there at the speed of device memory. Good for
  pages of 128 KiB and more; smaller ones are slow. `load_layer` has only fragments to copy: slow
  below 32 KiB. Slots and count are read on the host, so a call waits for them, but not for the
  pools.
  """

  name = "copy_engine"

  def __init__(
    self, page_layout: layout.PageLayout, staging_bytes: int = DEFAULT_STAGING_BYTES
  ) -> None:
    self.layout = page_layout
    self._staging_pages = max(1, staging_bytes // page_layout.page_bytes)
    self._staging: jax.Array | None = None
    self._calls = cuda_copies.CopyCalls(cuda_copies.submit_batch, cuda_copies.SideStream())
    self._load = jax.jit(self._load_round, donate_argnums=(1, 2))
    self._load_layer = jax.jit(
      lambda host, pool: self._calls.insert((pool,), (host,))[0], donate_argnums=1
    )
    self._store = functools.cache(self._make_store)

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
    device = tuple(device)
    for here, there in self._rounds(host_slots, device_slots, count):
      self._calls.hand_over(functools.partial(self._plan, here, to_staging=True))
      device, self._staging = self._load(
        host, device, self._take_staging(host), self._padded(there), np.int32(there.size)
      )
    return device

  def load_layer(
    self,
    host: io_backend.HostPool,
    device_layer: jax.Array,
    layer: int,
    host_slots: io_backend.Slots,
    device_slots: io_backend.Slots,
    count: io_backend.Count,
  ) -> jax.Array:
    """See `IoBackend.load_layer`; a copy a fragment, K and V together."""
    io_checks.check_layer(self.layout, host, device_layer, layer)
    io_checks.check_slots(host_slots, device_slots)
    here, there = cuda_copies.read_lists(host_slots, device_slots, count)
    size_bytes = self.layout.fragment_bytes

    def plan(written, read):
      fragments = here * self.layout.num_layers + layer
      return cuda_copies.Copies(
        targets=cuda_copies.addresses(written[0], there, size_bytes),
        sources=cuda_copies.addresses(read[0], fragments, size_bytes),
        size_bytes=size_bytes,
      )

    self._calls.hand_over(plan)
    return self._load_layer(host, device_layer)

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
    store = self._store(host.sharding)
    for here, there in self._rounds(host_slots, device_slots, count):
      self._calls.hand_over(functools.partial(self._plan, here, to_staging=False))
      host, self._staging = store(
        tuple(device), host, self._take_staging(host), self._padded(there), np.int32(there.size)
      )
    return host

  def _load_round(self, host, device, staging, device_slots, count):
    (staging,) = self._calls.insert((staging,), (host,))
    return api.pages_to_layers(staging, device, device_slots, count), staging

  def _make_store(self, sharding: jax.sharding.Sharding):
    def store_round(device, host, staging, device_slots, count):
      staging = api.layers_to_pages(device, staging, device_slots, count)
      (host,) = self._calls.insert((host,), (staging,))
      return host, staging

    return jax.jit(store_round, donate_argnums=(1, 2), out_shardings=(sharding, None))

  def _plan(self, host_slots: np.ndarray, written, read, *, to_staging: bool):
    """Row i of the staging buffer is host page `host_slots[i]`."""
    size_bytes = self.layout.page_bytes
    staging, host = (written[0], read[0]) if to_staging else (read[0], written[0])
    rows = cuda_copies.addresses(staging, np.arange(host_slots.size), size_bytes)
    pages = cuda_copies.addresses(host, host_slots, size_bytes)
    sources, targets = (pages, rows) if to_staging else (rows, pages)
    return cuda_copies.Copies(targets=targets, sources=sources, size_bytes=size_bytes)

  def _rounds(self, host_slots: jax.Array, device_slots: jax.Array, count: jax.Array | int):
    host, device = cuda_copies.read_lists(host_slots, device_slots, count)
    for first in range(0, host.size, self._staging_pages):
      part = slice(first, first + self._staging_pages)
      yield host[part], device[part]

  def _padded(self, slots: np.ndarray) -> np.ndarray:
    return np.pad(slots.astype(np.int32), (0, self._staging_pages - slots.size))

  def _take_staging(self, host: jax.Array) -> jax.Array:
    """The staging buffer, which the next program donates and returns."""
    if self._staging is None:
      (device,) = host.devices()
      self._staging = jnp.zeros(
        self.layout.host_shape(self._staging_pages),
        self.layout.dtype,
        device=jax.sharding.SingleDeviceSharding(device),
      )
    return self._staging
