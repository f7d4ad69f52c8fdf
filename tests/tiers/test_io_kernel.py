import jax
import pytest

from strata_jax.pallas_kernels.fragment_io import api
from strata_jax.tiers import io_kernel, layout
from tests.pallas_kernels import lowering
from tests.tiers import io_contract

LAYOUT = layout.PageLayout(num_layers=2, page_size=1, kv_heads=1, head_dim=64)


@pytest.mark.gpu
class TestKernelIo(io_contract.IoContract):
  name = "kernel"


def test_every_call_can_be_part_of_a_larger_program():
  backend = io_kernel.KernelIo(LAYOUT, api.FragmentIoConfig(load_blocks=1))
  host = lowering.page_first(LAYOUT, 100, lowering.HOST)
  device = lowering.layer_first(LAYOUT, 100)
  lists = (lowering.slots(8), lowering.slots(8), lowering.scalar())
  load = lowering.lower(jax.jit(backend.load, donate_argnums=1), host, device, *lists)
  store = jax.jit(backend.store, donate_argnums=1, out_shardings=lowering.HOST)
  layer = jax.jit(
    lambda host, pool, *lists: backend.load_layer(host, pool, 1, *lists), donate_argnums=1
  )
  assert "mosaic_gpu" in load
  assert "mosaic_gpu" in lowering.lower(store, device, host, *lists)
  assert "mosaic_gpu" in lowering.lower(layer, host, device[0], *lists)


def test_another_shape_is_refused_before_anything_runs():
  backend = io_kernel.KernelIo(LAYOUT)
  host, device, _, _ = io_contract.pools(LAYOUT)
  slots = io_contract.slots([1])
  with pytest.raises(ValueError, match="expected 2 layers, got 1 arrays"):
    backend.load(host, device[:1], slots, slots, slots[0])
