"""What regions look like before XLA sees them; that they overlap is measured on a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest

from strata_jax import config as config_lib
from strata_jax.executors import programs, streams
from strata_jax.models import build

CONFIG = config_lib.MODELS["llama31_8b"]


def test_calls_are_inlined_and_compute_the_same():
  def function(x, tree):
    y = jax.nn.silu(x) + jnp.where(x > 0, x, tree["a"])
    return {"b": y, "c": jax.jit(lambda z: jax.jit(jnp.sum)(z))(y)}

  x, tree = jnp.linspace(-2.0, 2.0, 5), {"a": jnp.float32(3.0)}
  inlined = streams._without_calls(function)
  text = str(jax.make_jaxpr(inlined)(x, tree))
  assert "jit[" not in text
  assert "jit[" in str(jax.make_jaxpr(function)(x, tree))
  got, want = inlined(x, tree), function(x, tree)
  assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b), got, want))


@pytest.mark.parametrize(
  ("rows", "chunk", "attention"),
  [
    (1, 512, "cudnn"),
    (4, 1, "cudnn"),
    (1, 64, "xla"),
    (8, 1, "hopper"),
    (1, 64, "hopper"),
  ],
)
def test_a_layer_beside_a_load(rows, chunk, attention):
  host_device = jax.devices()[0]
  pinned = jax.sharding.SingleDeviceSharding(host_device, memory_kind="pinned_host")
  make = lambda *shape, **how: jax.ShapeDtypeStruct(shape, jnp.bfloat16, **how)
  ids = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  tensors = {
    field: make(*(shape[::-1] if len(shape) == 2 else shape))
    for field, (_, shape) in build.layer_shapes(CONFIG).items()
  }
  params = jax.eval_shape(build.layer_params, tensors)
  page_layout = CONFIG.page_layout(16)
  pool = make(*page_layout.device_shape(100))
  arguments = (
    params, make(rows, chunk, CONFIG.hidden_size), pool, pool,
    make(*page_layout.host_shape(50), sharding=pinned), ids(), (ids(), ids(64), ids(64)),
    programs.Where(ids(rows, 128), ids(rows), ids(rows)),
  )  # fmt: skip
  traced = programs.layer_beside_load.trace(*arguments, config=CONFIG, implementation=attention)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  main, *functions = text.split("func.func ")[1:]
  regions = re.findall(r'call @(compute_on\w*)\(.*_xla_stream_annotation = "(\d)"', main)
  assert [stream for _, stream in regions] == ["1", "2"]
  bodies = [next(f for f in functions if f"@{name}(" in f) for name, _ in regions]
  load, compute = bodies
  assert "mosaic_gpu" in load
  assert "dot_general" in compute
  cudnn = attention == "cudnn" or (attention == "hopper" and chunk > 1)
  assert ("__cudnn$fmha" in compute) == cudnn
  # What XLA's attention loops over precedes the load.
  assert ("mosaic_gpu" in compute) == (attention == "hopper" and chunk == 1)
  for body in bodies:
    assert " call @" not in body
    assert "stablehlo.while" not in body
    assert re.search(r"-> tensor<[^,]*>( |$)", body.splitlines()[0])  # one result
  assert text.count("tf.aliasing_output") == 2  # both pools in place
  barriers = [line for line in main.splitlines() if "optimization_barrier" in line]
  assert len(barriers) == 2
  assert not any("tensor<50x32x" in line for line in barriers)  # the host pool passes none
