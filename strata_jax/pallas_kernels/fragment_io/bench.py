"""Rates of the fragment moves for one model's pages."""

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.pallas_kernels import timing
from strata_jax.pallas_kernels.fragment_io import api
from strata_jax.tiers import layout


def measure(
  page_layout: layout.PageLayout,
  *,
  host_pages: int,
  pages: int,
  config: api.FragmentIoConfig | None = None,
  implementation: api.Implementation = "mosaic_gpu",
  seed: int = 0,
) -> dict[str, float]:
  """GB/s of whole pages at random slots.

  Args:
    page_layout: the pages, such as one of `arg_specs`.
    host_pages: size of the host pool.
    pages: pages a call, all distinct; also the size of the device pool.
    config: how the kernel runs.
    implementation: the kernel, or plain jnp on a CPU.
    seed: of the slots.

  Returns:
    `load` and `store`.
  """
  pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
  dtype = jnp.dtype(page_layout.dtype)
  make_host = jax.jit(
    lambda: jnp.ones(page_layout.host_shape(host_pages), dtype), out_shardings=pinned
  )
  rng = np.random.default_rng(seed)
  here = jnp.asarray(rng.permutation(host_pages)[:pages].astype(np.int32))
  there = jnp.asarray(rng.permutation(pages).astype(np.int32))
  count = jnp.int32(pages)
  how = {"config": config, "implementation": implementation}
  run_load = jax.jit(lambda *args: api.load_fragments(*args, **how), donate_argnums=1)
  run_store = jax.jit(
    lambda *args: api.store_fragments(*args, **how), donate_argnums=1, out_shardings=pinned
  )
  host = make_host()
  device = tuple(
    jnp.zeros(page_layout.device_shape(pages), dtype) for _ in range(page_layout.num_layers)
  )

  def load():
    nonlocal device
    device = run_load(host, device, here, there, count)
    return device

  def store():
    nonlocal host
    host = run_store(device, host, there, here, count)
    return host

  moved_bytes = pages * page_layout.page_bytes
  return {
    "load": moved_bytes / timing.seconds_a_call(load) / 1e9,
    "store": moved_bytes / timing.seconds_a_call(store) / 1e9,
  }
