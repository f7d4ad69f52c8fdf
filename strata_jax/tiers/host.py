"""The host pool: page-first, one array in pinned host memory that never moves."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.tiers import io_backend, layout


def make_host_pool(
  page_layout: layout.PageLayout, pages: int, device: jax.Device | None = None
) -> io_backend.HostPool:
  """A zeroed pool `[pages, layers, 2, page_size, kv_heads, head_dim]` in `pinned_host` memory.

  On a GPU the environment variable XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB must leave room for it.
  """
  device = device or jax.devices()[0]
  sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
  shape = page_layout.host_shape(pages)
  if device.platform == "cpu":  # device_put may keep using numpy's memory, which cannot be donated
    return jax.jit(lambda: jnp.zeros(shape, page_layout.dtype), out_shardings=sharding)()
  # A program would make the zeros in device memory first, where the host pool has no room.
  return jax.device_put(np.zeros(shape, jnp.dtype(page_layout.dtype)), sharding)


def page_bytes(pool: io_backend.HostPool) -> np.ndarray:
  """The pool's own memory as uint8 [pages, bytes of a page], to read and to write pages in place.

  It holds no reference to the pool: the pool stays donatable, and the memory is gone with the last
  array that stands for the pool. A view that numpy makes of the array itself would stay alive
  inside the array, and a donation would then copy the pool.
  """
  pool.block_until_ready()
  memory = (ctypes.c_uint8 * pool.nbytes).from_address(pool.unsafe_buffer_pointer())
  return np.ctypeslib.as_array(memory).reshape(pool.shape[0], -1)


def read_pages(pool: io_backend.HostPool, slots: np.ndarray) -> np.ndarray:
  """Copies of pages `[pages, layers, 2, page_size, kv_heads, head_dim]`."""
  copies = page_bytes(pool)[np.asarray(slots)]
  return copies.view(pool.dtype).reshape(-1, *pool.shape[1:])
