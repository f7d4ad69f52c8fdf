"""The `memcpy_async` back end: one driver copy for K and one for V a page and layer.

The published baseline (the Strata paper, section 2, measures it at a fifth of the link).
"""

import functools

import jax
import numpy as np

from strata_jax.tiers import cuda_copies, io_backend, io_checks, layout


class MemcpyAsyncIo:
  """`IoBackend` by a loop of `cudaMemcpyAsync`; a call waits for its slots, not for the pools."""

  name = "memcpy_async"

  def __init__(self, page_layout: layout.PageLayout) -> None:
    self.layout = page_layout
    self._half_bytes = page_layout.fragment_bytes // 2  # K or V
    self._calls = cuda_copies.CopyCalls(cuda_copies.submit_each)
    self._load = jax.jit(lambda host, device: self._calls.insert(device, (host,)), donate_argnums=1)
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
    layers = range(self.layout.num_layers)
    self._hand_over(host_slots, device_slots, count, layers, to_layers=True)
    return self._load(host, tuple(device))

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
    self._hand_over(host_slots, device_slots, count, (layer,), to_layers=True)
    return self._load(host, (device_layer,))[0]

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
    layers = range(self.layout.num_layers)
    self._hand_over(host_slots, device_slots, count, layers, to_layers=False)
    return self._store(host.sharding)(tuple(device), host)

  def _make_store(self, sharding: jax.sharding.Sharding):
    return jax.jit(
      lambda device, host: self._calls.insert((host,), device)[0],
      donate_argnums=1,
      out_shardings=sharding,
    )

  def _hand_over(self, host_slots, device_slots, count, layers, *, to_layers: bool) -> None:
    here, there = cuda_copies.read_lists(host_slots, device_slots, count)

    def plan(written, read):
      pools, (host,) = (written, read) if to_layers else (read, written)
      fragments = [here * self.layout.num_layers + layer for layer in layers]
      in_host = np.concatenate([self._half_addresses(host, index) for index in fragments])
      in_device = np.concatenate([self._half_addresses(pool, there) for pool in pools])
      sources, targets = (in_host, in_device) if to_layers else (in_device, in_host)
      return cuda_copies.Copies(targets=targets, sources=sources, size_bytes=self._half_bytes)

    self._calls.hand_over(plan)

  def _half_addresses(self, pool: int, fragments: np.ndarray) -> np.ndarray:
    """K and V of every fragment."""
    halves = (2 * fragments[:, None] + np.arange(2)).reshape(-1)
    return cuda_copies.addresses(pool, halves, self._half_bytes)
