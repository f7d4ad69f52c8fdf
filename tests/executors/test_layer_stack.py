"""Which layers share a program, and that this changes nothing that is computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import config as config_lib
from strata_jax.executors import gated_loads, layer_stack, programs
from strata_jax.models import random
from strata_jax.tiers import device as device_tier
from tests.executors.test_overlap import model

PAGES, PAGE_SIZE = 9, 4


def run(num_layers, layers_per_program, gate=None, reached=None):
  config, params = model(num_layers)
  stack = layer_stack.LayerStack(
    config, params, "reference", jax.devices()[0], layers_per_program=layers_per_program
  )
  pools = device_tier.make_device_pool(config.page_layout(PAGE_SIZE), PAGES)
  batch = layer_stack.Batch(
    jnp.arange(14, dtype=jnp.int32).reshape(2, 7),
    jnp.array([[3, 1], [2, 5]], jnp.int32),
    jnp.array([0, 0], jnp.int32),
    jnp.array([7, 5], jnp.int32),
  )
  xs, pools = stack.run(pools, [batch, batch], gate=gate, reached=reached)
  return np.asarray(xs[1]), device_tier.read_pages(pools, np.arange(PAGES))


@pytest.mark.parametrize(
  ("layers_per_program", "loaded", "groups"),
  [
    ((1,), [0, 9, 9, 9, 9], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
    ((2,), [0, 0, 0, 0, 0], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),  # the link is the slower one
    ((2,), [0, 9, 9, 9, 9], [(0, 1), (1, 3), (3, 5)]),
    ((2,), [0, 2, 3, 5], [(0, 1), (1, 2), (2, 3), (3, 5)]),  # what was there by then
    ((3,), [0, 9, 9, 9, 9], [(0, 1), (1, 4), (4, 5)]),  # no program has two
    ((1, 2, 4), [0, 9, 9, 9], [(0, 1), (1, 5), (5, 7)]),  # the largest that fits
    ((1, 2, 4), [0, 4, 9], [(0, 1), (1, 3), (3, 7)]),  # and is there
  ],
)
def test_layers_that_are_loaded_share_a_gate_and_a_program(
  monkeypatch, layers_per_program, loaded, groups
):
  held, reached, launched = [], [], []
  layers = groups[-1][-1]
  gate = gated_loads.Gate(
    lambda layer, pool: held.append(layer) or pool, lambda layer: layer < loaded[len(held)]
  )

  def step(layer, pool):
    reached.append(layer)
    assert pool.shape[0] == PAGES

  for name in ("layer", "layers"):
    program = getattr(programs, name)
    monkeypatch.setattr(
      programs, name, lambda *args, _call=program, **how: launched.append(1) or _call(*args, **how)
    )

  got = run(layers, layers_per_program, gate, step)
  assert held == [stop - 1 for _, stop in groups]
  assert reached == list(range(layers))
  assert len(launched) == 2 * len(groups)  # of two batches
  monkeypatch.undo()
  for mine, expected in zip(got, run(layers, (1,)), strict=True):
    np.testing.assert_allclose(mine, expected, atol=1e-5)


def test_a_run_with_nothing_beside_it_goes_by_groups(monkeypatch):
  sizes = []
  layers = programs.layers
  monkeypatch.setattr(
    programs, "layers", lambda params, *args, **how: sizes.append(len(params)) or layers(
      params, *args, **how
    )
  )  # fmt: skip
  run(5, (2,))
  assert sizes == [2, 2, 2, 2]  # and the last layer alone
  sizes.clear()
  run(7, (1, 2))
  assert sizes == [2] * 6  # behind one layer alone


def test_layers_of_decodes_do_not_plan_again_what_they_read():
  config = config_lib.MODELS["llama31_8b"]
  shape = lambda *sizes, dtype=jnp.int32: jax.ShapeDtypeStruct(sizes, dtype)
  params = jax.eval_shape(lambda: random.random_params(config)).layers[0]
  pool = shape(*config.page_layout(16).device_shape(100), dtype=jnp.bfloat16)
  where = shape(8, 128), shape(8), shape(8)
  how = {"config": config, "implementation": "hopper"}
  embedding = shape(config.vocab_size, config.hidden_size, dtype=jnp.bfloat16)
  enter = functools.partial(programs.enter, page_size=16, **how)
  x, plan = jax.eval_shape(enter, embedding, shape(8, 1), *where)

  def all_pairs_of_tables(*plan):
    traced = programs.layer.trace(params, x, pool, programs.Where(*where, *plan), **how)
    return "tensor<8x8x128x" in traced.lower(lowering_platforms=("cuda",)).as_text()

  assert all_pairs_of_tables()
  assert not all_pairs_of_tables(plan)
