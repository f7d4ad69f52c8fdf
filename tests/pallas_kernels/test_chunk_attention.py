"""Chunk attention: in the interpreter, lowered for an H200, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from strata_jax import attention
from strata_jax.pallas_kernels.chunk_attention import api, bench, mosaic_gpu, reference
from strata_jax.pallas_kernels.chunk_attention.arg_specs import ARG_SPECS, ChunkArgs
from tests.pallas_kernels import lowering, moves, random_pages

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
TOLERANCE = 2e-2  # bfloat16 weights of the values, values of about 1
SMALL = ChunkArgs(batch=2, chunk=8, heads=4, kv_heads=2, head_dim=64, page_size=8)
SPEC = ARG_SPECS["llama3.1-8b-tp1-page32-batch4"]
OTHERS = (  # eight pages a tile, a tile of half a page and of a quarter; a single warpgroup
  {"page_size": 8},
  {"page_size": 128},
  {"page_size": 256, "head_dim": 64},
  {"chunk": 16},
)
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


def _batch(args: ChunkArgs, starts, lengths, seed=0):
  """Random operands, see `pages_of`."""
  starts, lengths = np.asarray(starts, np.int32), np.asarray(lengths, np.int32)
  tokens = np.where(lengths > 0, starts + lengths, 0)
  rng = np.random.default_rng(seed)
  pool, table = random_pages.pages_of(args, tokens, rng)
  q = rng.standard_normal((len(tokens), *args.q_shape()[1:]), np.float32)
  return jnp.asarray(q, jnp.bfloat16), pool, table, jnp.asarray(starts), jnp.asarray(lengths)


def _assert_close(got, want):
  got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
  assert np.isfinite(got).all()
  np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def test_reference_is_that_of_attention():
  operands = _batch(SMALL, [21, 0], [5, 8])
  q, pool, table, starts, lengths = operands
  unused = jnp.zeros((2, 8, 2, 64), jnp.bfloat16)
  want = attention.paged_attention(
    q, unused, unused, jnp.nan_to_num(pool), jnp.clip(table, 0, len(pool) - 1), starts, lengths,
    implementation="reference",
  )  # fmt: skip
  got = reference.attend(*operands)
  for row, length in enumerate((5, 8)):
    _assert_close(got[row, :length], want[row, :length])
    assert not np.asarray(got[row, length:]).any()


def test_no_query_sees_what_comes_after_it():
  q, pool, table, starts, lengths = _batch(SMALL, [20, 0], [8, 0])
  want = reference.attend(q, pool, table, starts, lengths)
  shorter = reference.attend(q, pool, table, starts, lengths - jnp.array([3, 0], jnp.int32))
  np.testing.assert_array_equal(shorter[0, :5], want[0, :5])


@pytest.fixture
def interpreted(monkeypatch):
  """`chunk_attention` in the interpreter."""
  attend = functools.partial(mosaic_gpu.attend, interpret=INTERPRET)
  monkeypatch.setattr(mosaic_gpu, "attend", attend)

  def run(operands, **config):
    got = api.chunk_attention(*operands, config=api.ChunkAttentionConfig(**config))
    assert not moves.races_found()
    return got

  return run


@pytest.mark.parametrize(
  ("heads", "kv_heads", "page_size", "chunk", "starts", "lengths", "config"),
  [
    # One warpgroup has no valid query in the second row; both have none in the third.
    (8, 2, 16, 32, [70, 9, 3], [32, 13, 0], {"blocks": 6, "warpgroups": 2, "stages": 2}),
    # More warpgroups than there are queries for, in a block; a block of nothing but padding.
    slow(4, 1, 32, 64, [130, 64], [33, 64], {"blocks": 3, "stages": 3}),
    slow(3, 1, 64, 40, [0, 127, 100], [40, 1, 2], {"blocks": 2}),  # groups of three
    slow(2, 2, 8, 8, [56, 63, 0], [8, 1, 3], {"blocks": 4}),  # no groups; eight pages a tile
    slow(8, 1, 128, 16, [250, 1], [16, 16], {"blocks": 5, "stages": 1}),  # half a page a tile
    slow(4, 2, 16, 16, [0, 0], [0, 0], {"blocks": 4}),  # nothing but padding
    slow(4, 1, 16, 4, [400], [4], {"blocks": 3, "part_factor": 1}),
  ],
)
def test_interpreted_kernel_is_the_reference(
  interpreted, heads, kv_heads, page_size, chunk, starts, lengths, config
):
  args = ChunkArgs(
    batch=len(starts), chunk=chunk, heads=heads, kv_heads=kv_heads, head_dim=64,
    page_size=page_size,
  )  # fmt: skip
  operands = _batch(args, starts, lengths)
  got = interpreted(operands, **config)
  assert (got.shape, got.dtype) == (operands[0].shape, jnp.bfloat16)
  _assert_close(got, reference.attend(*operands))


def _shapes(args: ChunkArgs, pages: int = 1000):
  shape = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=lowering.DEVICE)
  rows = shape((args.batch,), jnp.int32)
  return (
    shape(args.q_shape(), jnp.bfloat16),
    shape(args.pool_shape(pages), jnp.bfloat16),
    shape((args.batch, 700), jnp.int32),
    rows,
    rows,
  )


@pytest.mark.parametrize("name", ARG_SPECS)
def test_every_arg_spec_lowers_for_an_h200(name):
  shapes = _shapes(ARG_SPECS[name])
  assert api.supports(*shapes[:2])
  assert "mosaic_gpu" in lowering.lower(jax.jit(api.chunk_attention), *shapes)


@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_other_shapes_lower_for_an_h200(changes):
  shapes = _shapes(dataclasses.replace(SPEC, **changes))
  assert api.supports(*shapes[:2])
  assert "mosaic_gpu" in lowering.lower(jax.jit(api.chunk_attention), *shapes)


@pytest.mark.parametrize("config", bench.CONFIGS, ids=bench.name_of)
def test_every_config_of_the_bench_lowers_for_an_h200(config):
  attend = jax.jit(bench.kernel(config))
  assert "mosaic_gpu" in lowering.lower(attend, *_shapes(SPEC))


def test_with_a_plan_it_is_lowered_once_for_all_programs(monkeypatch):
  lowered = lowering.count_lowered_once(monkeypatch)
  shapes = _shapes(SPEC)
  plan = jax.eval_shape(
    functools.partial(api.make_plan, kv_heads=8, page_size=32), shapes[3], shapes[4]
  )

  def layers(q, *operands, times):
    return [api.chunk_attention(q + i, *operands[:-1], plan=operands[-1]) for i in range(times)]

  for times in (1, 3):
    program = jax.jit(functools.partial(layers, times=times))
    assert "mosaic_gpu" in lowering.lower(program, *shapes, plan)
  assert len(lowered) == 1


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"head_dim": 96}, "head_dim: expected 64 or 128, got 96"),
    ({"page_size": 24}, "page_size: expected 8, 16, 32 or a multiple of 64, got 24"),
    ({"page_size": 4}, "page_size: expected 8, 16, 32 or a multiple of 64, got 4"),
  ],
)
def test_what_the_kernel_does_not_take(changes, message):
  shapes = _shapes(dataclasses.replace(SPEC, **changes))
  assert not api.supports(*shapes[:2])
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(api.chunk_attention, *shapes)


@pytest.mark.parametrize(
  ("index", "shape", "message"),
  [
    (0, (4, 32, 128), r"q: expected \[B, T, heads, D\], got \(4, 32, 128\)"),
    (0, (4, 64, 30, 128), "heads: expected a multiple of 8, got 30"),
    (1, (9, 32, 8, 128), r"pool: expected \[pages, 2, page_size, kv_heads, 128\]"),
    (2, (3, 700), r"expected \[4, N\], \[4\] and \[4\], got \(3, 700\)"),
    (4, (4, 1), r"expected \[4, N\], \[4\] and \[4\]"),
    (3, (5,), r"expected \[4, N\], \[4\] and \[4\]"),
  ],
)
def test_shapes_that_do_not_fit_together(index, shape, message):
  shapes = list(_shapes(SPEC))
  shapes[index] = jax.ShapeDtypeStruct(shape, shapes[index].dtype)
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(api.chunk_attention, *shapes)


def test_other_dtypes_plans_and_configs():
  shapes = list(_shapes(SPEC))
  plan = jax.eval_shape(
    functools.partial(api.make_plan, kv_heads=8, page_size=32), *(jnp.zeros(3, jnp.int32),) * 2
  )
  with pytest.raises(ValueError, match=r"plan: expected .* \(4, 16, 32, .*, got \(3, 16, 32"):
    jax.eval_shape(functools.partial(api.chunk_attention, plan=plan), *shapes)
  for made, config in (({"page_size": 16}, None), ({}, api.ChunkAttentionConfig(part_factor=1))):
    how = {"kv_heads": 8, "page_size": 32} | made
    other = jax.eval_shape(functools.partial(api.make_plan, **how), *shapes[3:])
    with pytest.raises(ValueError, match=r"plan: expected .*\(4, 16, 32, .*, got \(4, 16, "):
      jax.eval_shape(functools.partial(api.chunk_attention, plan=other, config=config), *shapes)
  shapes[0] = jax.ShapeDtypeStruct(SPEC.q_shape(), jnp.float32)
  with pytest.raises(ValueError, match="q: expected bfloat16, got float32"):
    jax.eval_shape(api.chunk_attention, *shapes)
  large = api.ChunkAttentionConfig(stages=7)
  with pytest.raises(ValueError, match="for 7 stages and 3 warpgroups"):
    jax.eval_shape(functools.partial(api.chunk_attention, config=large), *_shapes(SPEC))
  with pytest.raises(ValueError, match="warpgroups"):
    api.ChunkAttentionConfig(warpgroups=4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARG_SPECS)
def test_parity(name):
  args = ARG_SPECS[name]
  rows = [(3000, 33), (70, 64), (0, 48), (5, 0)][: args.batch]
  operands = _batch(args, *zip(*rows, strict=True))
  _assert_close(jax.jit(api.chunk_attention)(*operands), reference.attend(*operands))


@pytest.mark.gpu
@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_parity_of_other_shapes(changes):
  args = dataclasses.replace(SPEC, **changes)
  operands = _batch(args, [3000, 127, 0, 5], [args.chunk, 9, 16, 0])
  _assert_close(jax.jit(api.chunk_attention)(*operands), reference.attend(*operands))


@pytest.mark.gpu
@pytest.mark.parametrize("config", bench.CONFIGS, ids=bench.name_of)
def test_parity_of_configs(config):
  """Twice in a program, with a plan, and with rows that are shared by many blocks."""
  operands = _batch(SPEC, [5000, 63, 64, 2111], [1, 33, 64, 49], seed=1)

  @jax.jit
  def twice(q, pool, table, starts, lengths):
    plan = api.make_plan(starts, lengths, kv_heads=8, page_size=32, config=config)
    call = functools.partial(api.chunk_attention, plan=plan, config=config)
    return [call(x, pool, table, starts, lengths) for x in (q, -q)]

  for got, q in zip(twice(*operands), (operands[0], -operands[0]), strict=True):
    _assert_close(got, reference.attend(q, *operands[1:]))


def test_the_bench_runs():
  args = dataclasses.replace(SMALL, batch=3)
  attend = bench.kernel(implementation="reference")
  for shared in (False, True):
    us = bench.measure(args, (8, 0, 3), 16, attend=attend, share_contexts=shared, calls=2)
    assert us > 0
