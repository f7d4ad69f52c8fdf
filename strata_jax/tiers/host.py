"""The host pool: page-first, one array in pinned host memory that never moves."""

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


def read_pages(pool: io_backend.HostPool, slots: np.ndarray) -> np.ndarray:
  """Copies of pages `[pages, layers, 2, page_size, kv_heads, head_dim]`.

  The view it takes is gone when it returns, so that the pool can be donated again.
  """
  return np.asarray(pool)[np.asarray(slots)]
