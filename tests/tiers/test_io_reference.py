import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from strata_jax.tiers import io_auto, layout
from tests.tiers import io_contract


class TestReferenceIo(io_contract.IoContract):
  name = "reference"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8"])
def test_every_dtype_of_a_layout_moves(dtype):
  page_layout = layout.PageLayout(num_layers=2, page_size=2, kv_heads=3, head_dim=64, dtype=dtype)
  backend = io_auto.make_io_backend("reference", page_layout)
  host, device, host_bytes, device_bytes = io_contract.pools(page_layout)
  device = backend.load(host, device, jnp.array([5]), jnp.array([3]), jnp.int32(1))
  device_bytes[:, 3] = host_bytes[5]
  for layer, pool in enumerate(device):
    np.testing.assert_array_equal(io_contract.as_bytes(pool), device_bytes[layer].view(np.uint8))


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(data=st.data())
def test_store_then_load_is_the_identity(data):
  page_layout = layout.PageLayout(num_layers=2, page_size=1, kv_heads=1, head_dim=8)
  backend = io_auto.make_io_backend("reference", page_layout)
  host, device, _, device_bytes = io_contract.pools(page_layout)
  count = data.draw(st.integers(0, io_contract.BUCKET))
  some = lambda pages: data.draw(
    st.lists(st.integers(0, pages - 1), min_size=count, max_size=count, unique=True)
  )
  sources, kept, targets = (
    some(io_contract.DEVICE_PAGES),
    some(io_contract.HOST_PAGES),
    some(io_contract.DEVICE_PAGES),
  )
  slots = io_contract.slots
  host = backend.store(device, host, slots(sources), slots(kept), jnp.int32(count))
  device = backend.load(host, device, slots(kept), slots(targets), jnp.int32(count))
  device_bytes[:, targets] = device_bytes[:, sources]
  np.testing.assert_array_equal(np.stack([np.array(pool) for pool in device]), device_bytes)
