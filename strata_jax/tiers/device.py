"""The device pool: layer-first, one array a layer, updated in place by donation."""

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.tiers import io_backend, layout


def make_device_pool(
  page_layout: layout.PageLayout, pages: int, device: jax.Device | None = None
) -> io_backend.DevicePool:
  """A zeroed pool that XLA owns: a layer each `[pages, 2, page_size, kv_heads, head_dim]`.

  Whoever passes it to a function that donates it keeps what that function returns. No numpy view
  of it may be alive then: the CPU would copy the pool, a GPU would raise.
  """
  sharding = jax.sharding.SingleDeviceSharding(device or jax.devices()[0])
  shape = page_layout.device_shape(pages)
  zeros = jax.jit(lambda: jnp.zeros(shape, page_layout.dtype), out_shardings=sharding)
  return tuple(zeros() for _ in range(page_layout.num_layers))


def read_pages(pool: io_backend.DevicePool, slots: np.ndarray) -> np.ndarray:
  """Copies of pages `[pages, layers, 2, page_size, kv_heads, head_dim]`; no fast path."""
  taken = jnp.asarray(slots)
  return np.stack([np.asarray(layer[taken]) for layer in pool], axis=1)


def buffer_pointers(pool: io_backend.DevicePool) -> tuple[int, ...]:
  """Where the layers lie; the same for a whole run."""
  return tuple(layer.unsafe_buffer_pointer() for layer in pool)
