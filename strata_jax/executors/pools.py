"""The two pools of an executor."""

import jax

from strata_jax.tiers import device as device_tier
from strata_jax.tiers import host as host_tier
from strata_jax.tiers import io_backend, layout

# Device and host pool.
Pools = tuple[io_backend.DevicePool, io_backend.HostPool | None]


def make(
  page_layout: layout.PageLayout, device_pages: int, host_pages: int, target: jax.Device
) -> Pools:
  """Zeroed pools; no host pool for 0 pages."""
  device = device_tier.make_device_pool(page_layout, device_pages, target)
  if not host_pages:
    return device, None
  return device, host_tier.make_host_pool(page_layout, host_pages, target)


def check(pools: Pools, page_layout: layout.PageLayout, device_pages: int, host_pages: int) -> None:
  """Raises ValueError unless the pools are of this layout and size."""
  device, host = pools
  expected = [page_layout.device_shape(device_pages)] * page_layout.num_layers
  if [pool.shape for pool in device] != expected:
    raise ValueError(
      f"pools: expected {page_layout.num_layers} device pools of shape {expected[0]}, "
      f"got {len(device)} of {[pool.shape for pool in device[:1]]}"
    )
  expected_host = page_layout.host_shape(host_pages) if host_pages else None
  host_shape = None if host is None else host.shape
  if host_shape != expected_host:
    raise ValueError(f"pools: expected a host pool of shape {expected_host}, got {host_shape}")
