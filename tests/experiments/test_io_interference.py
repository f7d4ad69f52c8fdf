import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import flags, io_bench, io_interference, io_layers, io_streams
from strata_jax.pallas_kernels.fragment_io import api
from strata_jax.tiers import cuda_copies
from tests.pallas_kernels import lowering
from tests.tiers import cpu_driver


@pytest.mark.slow
def test_a_run_on_a_cpu_measures_the_baseline_and_says_so(tmp_path, capsys):
  io_interference.main(io_interference.FLAGS.parse([f"--out={tmp_path}"]))
  captured = capsys.readouterr()
  summary = json.loads(captured.out.splitlines()[-1])
  assert "No GPU" in captured.err
  (row,) = summary["rows"]
  assert (row["blocks"], row["prefill_slowdown"], row["decode_slowdown"]) == (0, 0.0, 0.0)
  assert row["prefill_ms"] > 0
  assert row["decode_ms"] > 0


@pytest.mark.parametrize("argument", ["--blocks=0,1", "--rounds=0", "--no_such_flag=1"])
def test_impossible_flags_are_refused(tmp_path, argument):
  with pytest.raises(flags.UsageError):
    io_interference.main(io_interference.FLAGS.parse([f"--out={tmp_path}", argument]))


@pytest.mark.slow
def test_decode_is_attention_over_the_whole_context():
  """A layer whose attention output alone remains equals plain softmax attention."""
  shape = io_layers.Shape(model_dim=32, heads=4, kv_heads=2, head_dim=8, mlp_dim=16)
  stack = io_layers.decode(3, 10, 1, shape, jnp.float32)
  arrays = stack.arrays | {"down": jnp.zeros_like(stack.arrays["down"])}
  got = stack.run(stack.activations, arrays) - stack.activations
  x = stack.activations
  q = (x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5)) @ arrays["qkv"][:, :32]
  q = q.reshape(3, 4, 8)
  k, v = (np.repeat(arrays[name], 2, axis=1) for name in ("k", "v"))  # [batch, heads, context, dim]
  weights = jax.nn.softmax(np.einsum("bhd,bhsd->bhs", q, k) / np.sqrt(8))
  want = np.einsum("bhs,bhsd->bhd", weights, v).reshape(3, 32) @ arrays["out"]
  np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_inlining_calls_changes_no_result(name):
  stack = io_layers.small_stacks()[name]
  inlined = jax.jit(io_streams.without_calls(stack.run))(stack.activations, stack.arrays)
  np.testing.assert_allclose(inlined, stack.run(stack.activations, stack.arrays), atol=1e-5)


def test_regions_with_a_stream_contain_no_calls():
  page_layout = io_bench.fragments_of(4096)
  host = lowering.page_first(page_layout, 100, lowering.HOST)
  (pool,) = lowering.layer_first(page_layout, 100)
  stack = io_layers.small_stacks()["prefill"]
  abstract = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=lowering.DEVICE)

  def load(host, pool, here, there, count):
    return api.load_fragments(host, (pool,), here, there, count)[0]

  program = jax.jit(io_streams.on_two_streams(load, stack.run), donate_argnums=1)
  text = lowering.lower(
    program,
    host,
    pool,
    lowering.slots(64),
    lowering.slots(64),
    lowering.scalar(),
    abstract(stack.activations),
    jax.tree.map(abstract, stack.arrays),
  )
  regions = [part for part in text.split("func.func ") if part.startswith("private @compute_on")]
  assert len(regions) == 2
  assert not any(" call @" in region for region in regions)
  for number in (1, 2):
    assert f'_xla_stream_annotation = "{number}"' in text


def test_copies_run_for_as_long_as_the_work(monkeypatch):
  cpu_driver.install(monkeypatch)
  source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
  places = [
    cuda_copies.addresses(array.ctypes.data, np.arange(4), 16) for array in (target, source)
  ]
  copies = cuda_copies.Copies(targets=places[0], sources=places[1], size_bytes=16)
  sides = (cpu_driver.SideStream(), cpu_driver.SideStream())
  result, gbps = io_streams.while_copying(lambda: "done", [copies], sides)
  assert result == "done"
  assert gbps > 0
  np.testing.assert_array_equal(target, source)
