"""Pages of both pools as copies by the CUDA driver, layer by layer."""

from collections.abc import Iterator

import numpy as np

from strata_jax.tiers import cuda_copies, io_backend, layout

# Back ends by the driver: how they submit, and how many copies a fragment takes (K and V apart).
BACKENDS = ("memcpy_async", "copy_engine")


class FragmentCopies:
  """The copies between two pools that never move: their addresses are taken once."""

  def __init__(
    self,
    page_layout: layout.PageLayout,
    backend: str,
    pools: io_backend.DevicePool,
    host: io_backend.HostPool,
  ) -> None:
    """Takes the addresses.

    Args:
      page_layout: of the pools.
      backend: one of BACKENDS: `memcpy_async` copies K and V apart, one call each; `copy_engine`
        a fragment in one piece, all of a layer's in one call.
      pools: of the device. They never move: their addresses are taken here.
      host: the host pool, likewise.
    """
    self._device_at = np.array([pool.unsafe_buffer_pointer() for pool in pools], np.uint64)
    self._host_at = host.unsafe_buffer_pointer()
    self.layers = page_layout.num_layers
    each = backend == "memcpy_async"
    self.submit = cuda_copies.submit_each if each else cuda_copies.submit_batch
    self._parts = 2 if each else 1
    self._size_bytes = page_layout.fragment_bytes // self._parts

  def by_layer(
    self,
    host_slots: np.ndarray,
    device_slots: np.ndarray,
    *,
    to_device: bool,
    layers_at_once: int = 1,
  ) -> Iterator[cuda_copies.Copies]:
    """The copies of each layer, or of so many layers in a row, for slots int32 [pages].

    Addresses are computed all at once.
    """
    parts = np.arange(self._parts)
    layers = np.arange(self.layers)[:, None]
    fragments = host_slots.astype(np.int64) * self.layers + layers  # [layers, pages]
    in_host = (fragments[..., None] * self._parts + parts).reshape(self.layers, -1)
    in_pool = (device_slots.astype(np.int64)[:, None] * self._parts + parts).reshape(-1)
    on_host = cuda_copies.addresses(self._host_at, in_host, self._size_bytes)
    on_device = self._device_at[:, None] + cuda_copies.addresses(0, in_pool, self._size_bytes)
    targets, sources = (on_device, on_host) if to_device else (on_host, on_device)
    for first in range(0, self.layers, layers_at_once):
      some = slice(first, first + layers_at_once)
      yield cuda_copies.Copies(
        targets=targets[some].ravel(), sources=sources[some].ravel(), size_bytes=self._size_bytes
      )
