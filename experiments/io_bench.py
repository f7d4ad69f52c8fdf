"""What the I/O experiments share: pools, random lists, timing, the rate of one large DMA."""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.tiers import cuda_copies, layout

GB = 1e9
GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pools:
  """Two pools and random lists of distinct slots; host page p holds the number p throughout.

  Attributes:
    host: `[host_pages, layers, *fragment]`, pinned.
    device: a layer each.
    host_slots: int32 `[pages]`.
    device_slots: int32 `[pages]`.
  """

  page_layout: layout.PageLayout
  host: jax.Array
  device: tuple[jax.Array, ...]
  host_slots: jax.Array
  device_slots: jax.Array

  @property
  def pages(self) -> int:
    return self.host_slots.shape[0]

  @property
  def call_bytes(self) -> int:
    return self.pages * self.page_layout.page_bytes


def fragments_of(size_bytes: int, num_layers: int = 1) -> layout.PageLayout:
  """Pages whose fragments have `size_bytes`, a multiple of 256: one KV head, float32."""
  return layout.PageLayout(
    num_layers=num_layers, page_size=1, kv_heads=1, head_dim=size_bytes // 8, dtype="float32"
  )


def pinned() -> jax.sharding.Sharding:
  return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def make_pools(
  page_layout: layout.PageLayout, *, pool_bytes: int, call_bytes: int, seed: int
) -> Pools:
  """A host pool of `pool_bytes` and a device pool that one call of `call_bytes` fills."""
  host_pages = max(1, pool_bytes // page_layout.page_bytes)
  pages = max(1, min(host_pages, call_bytes // page_layout.page_bytes))
  rng = np.random.default_rng(seed)
  shape = page_layout.host_shape(host_pages)

  def numbered():
    numbers = jnp.arange(host_pages, dtype=page_layout.dtype)
    return jnp.broadcast_to(numbers.reshape(-1, *(1,) * (len(shape) - 1)), shape)

  return Pools(
    page_layout=page_layout,
    host=jax.jit(numbered, out_shardings=pinned())(),
    device=tuple(
      jnp.zeros(page_layout.device_shape(pages), page_layout.dtype)
      for _ in range(page_layout.num_layers)
    ),
    host_slots=jnp.asarray(rng.permutation(host_pages)[:pages].astype(np.int32)),
    device_slots=jnp.asarray(rng.permutation(pages).astype(np.int32)),
  )


def arrived(pools: Pools, device: tuple[jax.Array, ...]) -> bool:
  """Whether a load of the lists put the right page into every slot, at both ends of it."""
  want = pools.host_slots.astype(pools.page_layout.dtype)
  ends = jax.jit(lambda pool, slots: (pool[slots, 0, 0, 0, 0], pool[slots, -1, -1, -1, -1]))
  return all(bool((end == want).all()) for pool in device for end in ends(pool, pools.device_slots))


def seconds_on_stream(
  submit: Callable[[], None], side: cuda_copies.SideStream, *, rounds: int = 3, calls: int = 4
) -> float:
  """As `timing.seconds_a_call`, for work submitted to a CUDA stream."""
  submit()
  side.synchronize()
  times = []
  for _ in range(rounds):
    started_s = time.perf_counter()
    for _ in range(calls):
      submit()
    side.synchronize()
    times.append((time.perf_counter() - started_s) / calls)
  return float(np.median(times))


def dma_ceilings(side: cuda_copies.SideStream, size_bytes: int = GIB) -> tuple[float, float]:
  """GB/s of one large copy, load and store."""
  pools = make_pools(fragments_of(1 << 20), pool_bytes=size_bytes, call_bytes=size_bytes, seed=0)
  jax.block_until_ready((pools.host, pools.device))
  rates = []
  for source, target in ((pools.host, pools.device[0]), (pools.device[0], pools.host)):
    copies = cuda_copies.Copies(
      targets=np.array([target.unsafe_buffer_pointer()], np.uint64),
      sources=np.array([source.unsafe_buffer_pointer()], np.uint64),
      size_bytes=size_bytes,
    )
    submit = lambda copies=copies: cuda_copies.submit_each(copies, side.stream)
    rates.append(size_bytes / seconds_on_stream(submit, side) / GB)
  return rates[0], rates[1]


def cpu_copy_gbps(size_bytes: int = 64 << 20) -> float:
  """GB/s of a copy in CPU memory: the ceiling where there is no GPU."""
  source = np.ones(size_bytes, np.uint8)
  target = np.empty_like(source)
  times = []
  for _ in range(4):
    started_s = time.perf_counter()
    np.copyto(target, source)
    times.append(time.perf_counter() - started_s)
  return size_bytes / min(times) / GB
