"""The `device_put` back end: what a JAX user writes today, without kernels and CUDA."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.tiers import io_backend, io_checks, layout

_ROUND_PAGES = 64  # pages that one program scatters or gathers


class DevicePutIo:
  """`IoBackend` by `jax.device_put` of one page after the other; runs on every platform.

  Every call waits until its bytes have arrived. `store` writes into the host pool's memory, because
  JAX alone cannot update an array in pinned host memory in place.
  """

  name = "device_put"

  def __init__(self, page_layout: layout.PageLayout) -> None:
    self.layout = page_layout
    self._scatter = jax.jit(_scatter, donate_argnums=0)
    self._gather = jax.jit(_gather)

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
    return self._put(host, tuple(device), host_slots, device_slots, count, slice(None))

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
    one = slice(layer, layer + 1)
    return self._put(host, (device_layer,), host_slots, device_slots, count, one)[0]

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
    memory = _memory_of(jax.block_until_ready(host))
    for here, there in _rounds(host_slots, device_slots, count):
      pages = np.asarray(self._gather(tuple(device), _padded(there, 0)))
      memory[here] = pages[: here.size]
    return host

  def _put(self, host, device, host_slots, device_slots, count, layers: slice):
    (target,) = device[0].devices()
    view = np.asarray(host)
    for here, there in _rounds(host_slots, device_slots, count):
      pages = [view[slot, layers] for slot in _padded(here, here[0])]
      pages = jax.device_put(pages, target)
      outside = device[0].shape[0]  # written nowhere
      device = self._scatter(device, pages, _padded(there, outside))
      jax.block_until_ready(device)  # the view must be gone before the host pool is donated
    return device


def _scatter(device, pages, slots):
  stacked = jnp.stack(pages)  # [_ROUND_PAGES, layers, *fragment]
  return tuple(
    pool.at[slots].set(stacked[:, layer], mode="drop") for layer, pool in enumerate(device)
  )


def _gather(device, slots):
  return jnp.stack([pool[slots] for pool in device], axis=1)


def _rounds(host_slots: jax.Array, device_slots: jax.Array, count: jax.Array | int):
  host, device = np.asarray(host_slots), np.asarray(device_slots)
  for first in range(0, int(count), _ROUND_PAGES):
    part = slice(first, min(first + _ROUND_PAGES, int(count)))
    yield host[part], device[part]


def _padded(slots: np.ndarray, fill: int) -> np.ndarray:
  return np.pad(slots, (0, _ROUND_PAGES - slots.size), constant_values=fill)


def _memory_of(host: jax.Array) -> np.ndarray:
  """The pool's memory as a writable array; JAX does not know of it, so it holds no reference."""
  memory = (ctypes.c_ubyte * host.nbytes).from_address(host.unsafe_buffer_pointer())
  return np.frombuffer(memory, host.dtype).reshape(host.shape)
