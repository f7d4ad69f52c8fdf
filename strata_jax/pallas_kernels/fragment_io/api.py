"""The public calls of fragment I/O.

Both are pure, traceable functions; written in place they are under a `jax.jit` that donates the
pool they write. The host pool of `store_fragments` then needs `out_shardings` with the memory
kind "pinned_host", too. A host-typed operand of a region with its own memory space (`compute_on`)
goes through `host_memory.device_view` outside of it first.
"""

import dataclasses
import math
from typing import Literal

import jax

from strata_jax import validation
from strata_jax.pallas_kernels.fragment_io import mosaic_gpu, reference

Implementation = Literal["mosaic_gpu", "reference"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FragmentIoConfig:
  """How the kernel runs.

  Attributes:
    load_blocks: blocks of 1,024 threads for host to device; 2 fill PCIe 5 x16 on an H200.
    store_blocks: the same for device to host.
    loads_in_flight: loads of 16 bytes that a lane issues before it stores: 1, 2, 4 or 8. With 2
      blocks 4 fill the link; 8 queue up in the L2 cache and slow the compute beside them.
    sort_from: lists of at least so many pages may be put in the order of host memory first, where
      neighbours share page tables; for shorter ones sorting costs more than it gains.
    sort_below_bytes: they are where the blocks times the contiguous bytes that a slot stands for,
      8 KiB at most, are below this; above, the link is full without.
  """

  load_blocks: int = 2
  store_blocks: int = 2
  loads_in_flight: int = 4
  sort_from: int = 16384
  sort_below_bytes: int = 12 << 10

  def __post_init__(self) -> None:
    validation.check_int(self, "load_blocks", minimum=1, maximum=1024)
    validation.check_int(self, "store_blocks", minimum=1, maximum=1024)
    validation.check_choice(self, "loads_in_flight", (1, 2, 4, 8))
    validation.check_int(self, "sort_from", minimum=0)
    validation.check_int(self, "sort_below_bytes", minimum=0)

  def sorts(self, bucket: int, blocks: int, run_bytes: int) -> bool:
    """Whether lists of `bucket` slots, each of `run_bytes` on the host, are sorted."""
    in_flight = blocks * min(run_bytes, 8 << 10)
    return bucket >= self.sort_from and in_flight < self.sort_below_bytes


def load_fragments(
  host: jax.Array,
  device: tuple[jax.Array, ...],
  host_slots: jax.Array,
  device_slots: jax.Array,
  count: jax.Array | int,
  *,
  layer: jax.Array | int | None = None,
  implementation: Implementation = "mosaic_gpu",
  config: FragmentIoConfig | None = None,
) -> tuple[jax.Array, ...]:
  """Moves pages from the page-first host pool to layer-first device pools.

  Args:
    host: `[host_pages, layers, *fragment]`, pinned host or device memory.
    device: `[device_pages, *fragment]` for every layer, or one array if `layer` is given.
    host_slots: int32 `[bucket]`; may repeat.
    device_slots: int32 `[bucket]`; distinct among the first `count`.
    count: valid entries of the lists; entries beyond are never read.
    layer: moves the fragments of this layer alone.
    implementation: the kernel, or plain jnp.
    config: how the kernel runs.

  Returns:
    The device pools, changed at `device_slots[:count]`.

  Raises:
    ValueError: the pools do not fit together, or a fragment is no multiple of 16 bytes.
  """
  _check(host, device, host_slots, device_slots, layer)
  if implementation == "reference":
    if layer is None:
      return reference.load(host, device, host_slots, device_slots, count)
    return (reference.load_layer(host, device[0], layer, host_slots, device_slots, count),)
  config = config or FragmentIoConfig()
  return mosaic_gpu.load(
    host,
    device,
    host_slots,
    device_slots,
    count,
    layer=layer,
    blocks=config.load_blocks,
    loads_in_flight=config.loads_in_flight,
    sort=config.sorts(host_slots.shape[0], config.load_blocks, _run_bytes(host, device)),
  )


def store_fragments(
  device: tuple[jax.Array, ...],
  host: jax.Array,
  device_slots: jax.Array,
  host_slots: jax.Array,
  count: jax.Array | int,
  *,
  layer: jax.Array | int | None = None,
  implementation: Implementation = "mosaic_gpu",
  config: FragmentIoConfig | None = None,
) -> jax.Array:
  """Moves pages from layer-first device pools to the page-first host pool.

  The arguments are those of `load_fragments`, with the roles of the slots exchanged: the host
  slots are distinct, the device slots may repeat.

  Returns:
    The host pool, changed at `host_slots[:count]`.

  Raises:
    ValueError: the pools do not fit together, or a fragment is no multiple of 16 bytes.
  """
  _check(host, device, host_slots, device_slots, layer)
  if implementation == "reference":
    if layer is None:
      return reference.store(device, host, device_slots, host_slots, count)
    return reference.store_layer(device[0], host, layer, device_slots, host_slots, count)
  config = config or FragmentIoConfig()
  return mosaic_gpu.store(
    device,
    host,
    device_slots,
    host_slots,
    count,
    layer=layer,
    blocks=config.store_blocks,
    loads_in_flight=config.loads_in_flight,
    sort=config.sorts(host_slots.shape[0], config.store_blocks, _run_bytes(host, device)),
  )


def _run_bytes(host: jax.Array, device: tuple[jax.Array, ...]) -> int:
  """Contiguous bytes on the host that a slot stands for."""
  return len(device) * math.prod(host.shape[2:]) * host.dtype.itemsize


def _check(
  host: jax.Array,
  device: tuple[jax.Array, ...],
  host_slots: jax.Array,
  device_slots: jax.Array,
  layer: jax.Array | int | None,
) -> None:
  layers = host.shape[1] if layer is None else 1
  if len(device) != layers:
    raise ValueError(f"device pools: expected {layers}, got {len(device)}")
  for pool in device:
    if pool.shape[1:] != host.shape[2:] or pool.dtype != host.dtype:
      raise ValueError(
        f"device pool: expected fragments {host.dtype} {host.shape[2:]} as the host pool has, "
        f"got {pool.dtype} {pool.shape[1:]}"
      )
  if host_slots.shape != device_slots.shape or host_slots.ndim != 1:
    raise ValueError(
      f"slots: expected two lists of one length, got {host_slots.shape} and {device_slots.shape}"
    )
  if isinstance(layer, int) and not 0 <= layer < host.shape[1]:
    raise ValueError(f"layer: expected 0 <= layer < {host.shape[1]}, got {layer}")
