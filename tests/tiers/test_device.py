import jax
import numpy as np

from strata_jax.tiers import device, layout

LAYOUT = layout.PageLayout(num_layers=3, page_size=4, kv_heads=2, head_dim=8, dtype="bfloat16")


def test_a_layer_each_zeroed():
  pool = device.make_device_pool(LAYOUT, 5)
  assert len(pool) == 3
  assert all(layer.shape == (5, 2, 4, 2, 8) and layer.dtype == "bfloat16" for layer in pool)
  assert not any(np.asarray(layer, np.float32).any() for layer in pool)
  assert len(set(device.buffer_pointers(pool))) == 3


def test_donation_keeps_the_buffers_and_read_pages_holds_no_view():
  write = jax.jit(lambda pool: tuple(x.at[3].add(1) for x in pool), donate_argnums=0)
  pool = device.make_device_pool(LAYOUT, 5)
  before = device.buffer_pointers(pool)
  for _ in range(3):
    pool = write(pool)
    pages = device.read_pages(pool, np.array([3, 1]))
  assert device.buffer_pointers(pool) == before
  assert pages.shape == (2, 3, 2, 4, 2, 8)
  assert (pages[0] == 3).all()
  assert (pages[1] == 0).all()
