import jax
import numpy as np

from strata_jax.tiers import host, layout

LAYOUT = layout.PageLayout(num_layers=3, page_size=4, kv_heads=2, head_dim=8, dtype="bfloat16")


def test_one_zeroed_array_in_pinned_memory():
  pool = host.make_host_pool(LAYOUT, 5)
  assert pool.shape == (5, 3, 2, 4, 2, 8)
  assert pool.sharding.memory_kind == "pinned_host"
  assert not host.page_bytes(pool).any()


def test_donation_keeps_the_buffer_and_read_pages_holds_no_view():
  pool = host.make_host_pool(LAYOUT, 5)
  before = pool.unsafe_buffer_pointer()

  def bump(x):
    written = jax.device_put(x, jax.memory.Space.Device).at[2].add(1)
    return jax.device_put(written, jax.memory.Space.Host)

  write = jax.jit(bump, donate_argnums=0, out_shardings=pool.sharding)
  for _ in range(3):
    pool = write(pool)
    pages = host.read_pages(pool, np.array([2, 0]))
  assert pool.unsafe_buffer_pointer() == before
  assert (pages[0] == 3).all()
  assert (pages[1] == 0).all()


def test_page_bytes_are_the_memory_of_the_pool():
  pool = host.make_host_pool(LAYOUT, 5)
  view = host.page_bytes(pool)
  assert view.shape == (5, LAYOUT.page_bytes)
  view[4] = np.arange(LAYOUT.page_bytes) % 120
  np.testing.assert_array_equal(np.asarray(pool)[4].reshape(-1).view(np.uint8), view[4])
  pages = host.read_pages(pool, np.array([4]))
  view[4] = 0
  assert pages.any()  # a copy
