"""Rates of layout conversion, beside that of a plain copy in device memory."""

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.pallas_kernels import timing
from strata_jax.pallas_kernels.layout_convert import api
from strata_jax.tiers import layout


def device_copy_gbps(size_bytes: int = 1 << 30) -> float:
  """GB/s of a copy in device memory, bytes read plus bytes written."""
  source = jnp.arange(size_bytes // 4, dtype=jnp.int32)
  copy = jax.jit(jnp.copy)
  return 2 * size_bytes / timing.seconds_a_call(lambda: copy(source)) / 1e9


def measure(
  page_layout: layout.PageLayout,
  *,
  pages: int,
  blocks: int = api.DEFAULT_BLOCKS,
  implementation: api.Implementation = "mosaic_gpu",
  seed: int = 0,
) -> dict[str, float]:
  """GB/s, bytes read plus bytes written, of `pages` pages to and from random slots.

  Returns:
    `pages_to_layers` and `layers_to_pages`.
  """
  dtype = jnp.dtype(page_layout.dtype)
  slots = jnp.asarray(np.random.default_rng(seed).permutation(pages).astype(np.int32))
  count = jnp.int32(pages)
  staging = jnp.ones(page_layout.host_shape(pages), dtype)
  device = tuple(
    jnp.zeros(page_layout.device_shape(pages), dtype) for _ in range(page_layout.num_layers)
  )
  how = {"blocks": blocks, "implementation": implementation}
  run_there = jax.jit(lambda *args: api.pages_to_layers(*args, **how), donate_argnums=1)
  run_back = jax.jit(lambda *args: api.layers_to_pages(*args, **how), donate_argnums=1)

  def there():
    nonlocal device
    device = run_there(staging, device, slots, count)
    return device

  def back():
    nonlocal staging
    staging = run_back(device, staging, slots, count)
    return staging

  moved_bytes = 2 * pages * page_layout.page_bytes
  return {
    "pages_to_layers": moved_bytes / timing.seconds_a_call(there) / 1e9,
    "layers_to_pages": moved_bytes / timing.seconds_a_call(back) / 1e9,
  }
