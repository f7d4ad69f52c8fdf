"""What every I/O back end must do; a back end's test module subclasses `IoContract`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.tiers import io_auto, layout

HOST_PAGES = 24
DEVICE_PAGES = 16
BUCKET = 8
GARBAGE = np.array([-1, 2**31 - 1, -(2**31), 99, 7, 7, -5, 1000], np.int32)  # beyond `count`


def pattern(page_layout: layout.PageLayout, pages: int, seed: int) -> np.ndarray:
  """Page-first bytes that tell page, layer, K from V and place apart: f(page, layer, K or V)."""
  shape = page_layout.host_shape(pages)
  places = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
  return ((places * 31 + seed * 17) % 120 - 60).astype(jnp.dtype(page_layout.dtype))


def pinned(array: np.ndarray) -> jax.Array:
  """A pool that XLA owns: what `device_put` makes on a CPU may share the numpy array's memory."""
  device = jax.devices()[0]
  sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
  return jax.jit(lambda x: x, out_shardings=sharding)(array)


def pools(page_layout: layout.PageLayout):
  """Host pool, device pool and their bytes, page-first and layer-first."""
  host = pattern(page_layout, HOST_PAGES, seed=1)
  device = pattern(page_layout, DEVICE_PAGES, seed=2).swapaxes(0, 1).copy()
  return pinned(host), tuple(jnp.array(pool) for pool in device), host, device


def slots(entries: list[int]) -> jax.Array:
  """A bucket: the entries, then garbage that must never be used."""
  return jnp.asarray(np.concatenate([np.array(entries, np.int32), GARBAGE[len(entries) :]]))


def as_bytes(array) -> np.ndarray:
  return np.array(array).view(np.uint8)  # a copy: no view of a pool stays alive


def slow_zero() -> jax.Array:
  """An int32 0 that takes the device a while to find out."""
  x = jnp.full((700, 700), 1e-3, jnp.float32)
  body = lambda _, y: (y @ x) * 1e-3
  return jax.jit(lambda y: jax.lax.fori_loop(0, 40, body, y)[0, 0].astype(jnp.int32))(x)


class IoContract:
  """The tests of a back end; `name` is what `make_io_backend` takes."""

  name: str
  layouts = tuple(
    layout.PageLayout(num_layers=3, page_size=size, kv_heads=2, head_dim=64, dtype="bfloat16")
    for size in (1, 4, 16, 64)
  )

  def backend(self, page_layout: layout.PageLayout):
    return io_auto.make_io_backend(self.name, page_layout)

  @pytest.mark.parametrize("page_layout", layouts, ids=lambda x: f"page{x.page_size}")
  def test_store_then_load_to_other_slots_keeps_every_byte(self, page_layout):
    """Case 23."""
    backend = self.backend(page_layout)
    host, device, host_bytes, device_bytes = pools(page_layout)
    sources, kept, targets = [3, 0, 15, 7], [20, 1, 23, 8], [5, 6, 2, 12]
    host = backend.store(device, host, slots(sources), slots(kept), jnp.int32(4))
    host_bytes[kept] = device_bytes[:, sources].swapaxes(0, 1)
    np.testing.assert_array_equal(as_bytes(host), host_bytes.view(np.uint8))

    device = backend.load(host, device, slots(kept), slots(targets), jnp.int32(4))
    device_bytes[:, targets] = device_bytes[:, sources]
    for layer, pool in enumerate(device):  # K and V, the written pages and their neighbours
      np.testing.assert_array_equal(as_bytes(pool), device_bytes[layer].view(np.uint8))
    np.testing.assert_array_equal(as_bytes(host), host_bytes.view(np.uint8))

  def test_load_layer_writes_one_layer_of_every_page(self):
    page_layout = self.layouts[1]
    backend = self.backend(page_layout)
    host, device, host_bytes, device_bytes = pools(page_layout)
    for layer in range(page_layout.num_layers):
      got = backend.load_layer(
        host, device[layer], layer, slots([2, 9]), slots([11, 0]), jnp.int32(2)
      )
      device_bytes[layer, [11, 0]] = host_bytes[[2, 9], layer]
      np.testing.assert_array_equal(as_bytes(got), device_bytes[layer].view(np.uint8))

  @pytest.mark.parametrize("count", [0, 1, 7, BUCKET])
  def test_entries_beyond_the_count_are_never_used(self, count):
    page_layout = self.layouts[0]
    backend = self.backend(page_layout)
    host, device, host_bytes, device_bytes = pools(page_layout)
    reads, writes = [4, 4, 0, 5, 4, 11, 12, 13], [3, 9, 1, 15, 0, 8, 2, 4]  # reads repeat
    device = backend.load(
      host, device, slots(reads[:count]), slots(writes[:count]), jnp.int32(count)
    )
    device_bytes[:, writes[:count]] = host_bytes[reads[:count]].swapaxes(0, 1)
    for layer, pool in enumerate(device):
      np.testing.assert_array_equal(as_bytes(pool), device_bytes[layer].view(np.uint8))
    host = backend.store(
      device, host, slots(reads[:count]), slots(writes[:count]), jnp.int32(count)
    )
    host_bytes[writes[:count]] = device_bytes[:, reads[:count]].swapaxes(0, 1)
    np.testing.assert_array_equal(as_bytes(host), host_bytes.view(np.uint8))

  def test_the_written_pool_keeps_its_buffer(self):
    page_layout = self.layouts[2]
    backend = self.backend(page_layout)
    host, device, _, _ = pools(page_layout)
    host_at = host.unsafe_buffer_pointer()
    device_at = [pool.unsafe_buffer_pointer() for pool in device]
    for step in range(3):
      here, there = slots([step, 5]), slots([9, 2 + step])
      device = backend.load(host, device, here, there, jnp.int32(2))
      host = backend.store(device, host, there, here, jnp.int32(2))
      pool = backend.load_layer(host, device[1], 1, here, there, jnp.int32(1))
      device = (device[0], pool, device[2])
    assert host.unsafe_buffer_pointer() == host_at
    assert [pool.unsafe_buffer_pointer() for pool in device] == device_at
    assert host.sharding.memory_kind == "pinned_host"

  def test_a_store_waits_for_the_delayed_load_of_the_same_host_slots(self):
    """Case 20: the load is held up, the slots that it reads are overwritten at once."""
    page_layout = self.layouts[2]
    backend = self.backend(page_layout)
    host, device, host_bytes, device_bytes = pools(page_layout)
    count = jnp.int32(3) + slow_zero()
    read, written, again = [1, 2, 3], [4, 5, 6], [7, 8, 9]
    loaded = backend.load(host, device, slots(read), slots(written), count)
    host = backend.store(loaded, host, slots(again), slots(read), jnp.int32(3))
    device_bytes[:, written] = host_bytes[read].swapaxes(0, 1)
    for layer, pool in enumerate(loaded):
      np.testing.assert_array_equal(as_bytes(pool), device_bytes[layer].view(np.uint8))
    host_bytes[read] = device_bytes[:, again].swapaxes(0, 1)
    np.testing.assert_array_equal(as_bytes(host), host_bytes.view(np.uint8))

  def test_another_shape_is_refused(self):
    page_layout = self.layouts[0]
    backend = self.backend(page_layout)
    host, device, _, _ = pools(page_layout)
    four = slots([1, 2, 3, 4])
    with pytest.raises(ValueError, match="expected 3 layers, got 2 arrays"):
      backend.load(host, device[:2], four, four, jnp.int32(4))
    with pytest.raises(ValueError, match="layer 0: expected bfloat16"):
      backend.load(host, tuple(pool[:, :1] for pool in device), four, four, jnp.int32(4))
    with pytest.raises(ValueError, match=r"expected int32 \[bucket\]"):
      backend.store(device, host, four.astype(jnp.float32), four, jnp.int32(4))
    with pytest.raises(ValueError, match="two lists of one length"):
      backend.store(device, host, four, four[:3], jnp.int32(3))
    with pytest.raises(ValueError, match="expected 0 <= layer < 3, got 3"):
      backend.load_layer(host, device[0], 3, four, four, jnp.int32(4))
