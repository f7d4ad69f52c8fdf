"""Layout conversion: in the interpreter, lowered for an H200, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from strata_jax.pallas_kernels.layout_convert import api, mosaic_gpu, reference
from strata_jax.pallas_kernels.layout_convert.arg_specs import ARG_SPECS
from strata_jax.tiers import layout
from tests.pallas_kernels import lowering, moves

BUCKET = 6
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
SMALL = layout.PageLayout(num_layers=2, page_size=2, kv_heads=3, head_dim=16, dtype="bfloat16")


@pytest.mark.parametrize("count", [0, 4, BUCKET])
def test_interpreted_kernel_is_the_reference(count):
  rng = np.random.default_rng(1)
  staging, device = moves.random_pools(rng, SMALL, BUCKET, 10)
  slots = moves.random_lists(rng, BUCKET, 10, 10, count).writes
  how = {"blocks": 2, "interpret": INTERPRET}
  got = mosaic_gpu.pages_to_layers(staging, device, slots, jnp.int32(count), **how)
  moves.assert_same(got, reference.pages_to_layers(staging, device, slots, count))
  got = mosaic_gpu.layers_to_pages(device, staging, slots, jnp.int32(count), **how)
  moves.assert_same(got, reference.layers_to_pages(device, staging, slots, count))


def test_there_and_back_is_the_identity():
  rng = np.random.default_rng(2)
  staging, device = moves.random_pools(rng, SMALL, BUCKET, 10)
  slots = moves.random_lists(rng, BUCKET, 10, 10, 5).writes
  how = {"implementation": "reference"}
  device = api.pages_to_layers(staging, device, slots, 5, **how)
  back = api.layers_to_pages(device, jnp.zeros_like(staging), slots, 5, **how)
  np.testing.assert_array_equal(np.asarray(back[:5]), np.asarray(staging[:5]))
  assert not np.asarray(back[5:]).any()


@pytest.mark.parametrize("name", ARG_SPECS)
def test_every_arg_spec_lowers_for_an_h200_in_place(name):
  page_layout = ARG_SPECS[name]
  staging = lowering.page_first(page_layout, 16, lowering.DEVICE)
  device = lowering.layer_first(page_layout, 100)
  there = jax.jit(api.pages_to_layers, donate_argnums=1)
  back = jax.jit(api.layers_to_pages, donate_argnums=1)
  slots, scalar = lowering.slots(16), lowering.scalar()
  text = lowering.lower(there, staging, device, slots, scalar)
  assert text.count("tf.aliasing_output") == page_layout.num_layers
  assert lowering.lower(back, device, staging, slots, scalar).count("tf.aliasing_output") == 1


def test_buffers_that_do_not_fit_are_refused():
  staging, device = moves.random_pools(np.random.default_rng(0), SMALL, 4, 4)
  slots = jnp.zeros(4, jnp.int32)
  with pytest.raises(ValueError, match="device pools: expected 2, got 1"):
    api.pages_to_layers(staging, device[:1], slots, 4)
  with pytest.raises(ValueError, match="device_slots: expected one a staging row"):
    api.layers_to_pages(device, staging, slots[:3], 3)
  with pytest.raises(ValueError, match="device pool: expected fragments bfloat16"):
    api.pages_to_layers(staging, tuple(pool[:, :1] for pool in device), slots, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARG_SPECS)
def test_every_arg_spec_moves_the_right_bytes_on_a_gpu(name):
  page_layout = ARG_SPECS[name]
  rng = np.random.default_rng(4)
  there = jax.jit(api.pages_to_layers, donate_argnums=1)
  back = jax.jit(api.layers_to_pages, donate_argnums=1)
  for count in (0, 3, 16):
    staging, device = moves.random_pools(rng, page_layout, 16, 24)
    slots = jnp.asarray(moves.random_lists(rng, 16, 24, 24, count).writes)
    want = reference.pages_to_layers(staging, device, slots, count)
    device = there(staging, device, slots, jnp.int32(count))
    moves.assert_same(device, want)
    want = reference.layers_to_pages(device, jnp.zeros_like(staging), slots, count)
    moves.assert_same(back(device, jnp.zeros_like(staging), slots, jnp.int32(count)), want)
