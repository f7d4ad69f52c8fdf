"""Decode attention: its parts, in the interpreter, lowered for an H200, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from strata_jax.pallas_kernels.decode_attention import api, merge, mosaic_gpu, reference, tiles
from strata_jax.pallas_kernels.decode_attention.arg_specs import ARG_SPECS, DecodeArgs
from tests.pallas_kernels import lowering, moves

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
TOLERANCE = 2e-2  # bfloat16 weights of the values, values of about 1


def _batch(args: DecodeArgs, tokens, seed=0, spare_pages=3):
  """Random operands; what no valid token has written is NaN, table entries beyond are garbage."""
  rng = np.random.default_rng(seed)
  tokens = np.asarray(tokens, np.int32)
  used = -(-tokens // args.page_size)
  width, total = max(int(used.max()), 1) + 2, int(used.sum())
  pages = total + spare_pages
  order = rng.permutation(pages).astype(np.int32)
  table = rng.integers(-(2**31), 2**31, (len(tokens), width)).astype(np.int32)
  pool = np.full(args.pool_shape(pages), np.nan, np.float32)
  for row, count in enumerate(tokens):
    own, order = order[: used[row]], order[used[row] :]
    table[row, : used[row]] = own
    kv = rng.normal(size=(2, used[row] * args.page_size, args.kv_heads, args.head_dim))
    kv[:, count:] = np.nan
    shape = (2, used[row], args.page_size, args.kv_heads, args.head_dim)
    pool[own] = kv.reshape(shape).swapaxes(0, 1)
  q = rng.normal(size=(len(tokens), *args.q_shape()[1:]))
  return (
    jnp.asarray(q, jnp.bfloat16),
    jnp.asarray(pool, jnp.bfloat16),
    jnp.asarray(table),
    jnp.asarray(tokens),
  )


def _assert_close(got, want):
  for one, other in zip(got, want, strict=True):
    one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
    assert np.isfinite(one).all()
    np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE)


def test_reference_is_softmax_over_the_valid_tokens():
  args = DecodeArgs(batch=2, heads=4, kv_heads=2, head_dim=64, page_size=8)
  q, pool, table, tokens = _batch(args, [11, 0])
  out, lse = reference.attend(q, pool, table, tokens)
  kv = np.asarray(pool[table[0, :2]], np.float64)  # [2 pages, 2, page_size, kv_heads, D]
  for head in range(4):
    keys, values = (kv[:, kind, :, head // 2].reshape(16, 64)[:11] for kind in (0, 1))
    weights = np.exp(keys @ np.asarray(q[0, head], np.float64) / 8)
    np.testing.assert_allclose(out[0, head], weights @ values / weights.sum(), atol=1e-5)
    np.testing.assert_allclose(lse[0, head], np.log(weights.sum()), atol=1e-5)
  assert not np.asarray(out[1]).any()
  assert (np.asarray(lse[1]) == merge.NOTHING).all()


@pytest.mark.parametrize(
  ("heads", "kv_heads", "page_size", "tokens", "blocks"),
  [
    (8, 2, 16, [50, 0, 17], 4),  # two pages a tile, a padded row in between
    (8, 8, 16, [23, 16], 5),  # a page is two tiles
    (9, 3, 16, [70, 1], 2),  # heads that are padded; tiles of 192 rows
    (4, 1, 64, [64, 129, 63], 3),  # a tile is a page
    (4, 1, 8, [9], 4),  # eight pages a tile, of which two are valid
  ],
)
def test_interpreted_kernel_is_the_reference(heads, kv_heads, page_size, tokens, blocks):
  args = DecodeArgs(
    batch=len(tokens), heads=heads, kv_heads=kv_heads, head_dim=64, page_size=page_size
  )
  operands = _batch(args, tokens)
  tile = tiles.find_tile(kv_heads, page_size, 64)
  parts = tiles.most_parts(len(tokens), blocks, 2)
  out, lse, counts = mosaic_gpu.attend(
    *operands, tile=tile, stages=2, blocks=blocks, parts=parts, interpret=INTERPRET
  )
  assert not moves.races_found()
  counts = jnp.where(operands[-1] > 0, counts, 0)
  got = merge.merge_parts(out[:, :, :heads], lse[:, :, :heads], counts)
  _assert_close(got, reference.attend(*operands))


@pytest.mark.parametrize("name", ARG_SPECS)
def test_every_arg_spec_lowers_for_an_h200(name):
  args = ARG_SPECS[name]
  assert "mosaic_gpu" in _lowered(args, pages=1000)


def _lowered(args: DecodeArgs, pages: int, config=None) -> str:
  shape = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=lowering.DEVICE)
  return lowering.lower(
    jax.jit(lambda *operands: api.decode_attention(*operands, config=config)),
    shape(args.q_shape(), jnp.bfloat16),
    shape(args.pool_shape(pages), jnp.bfloat16),
    shape((args.batch, 700), jnp.int32),
    shape((args.batch,), jnp.int32),
  )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARG_SPECS)
def test_every_arg_spec_is_the_reference_on_a_gpu(name):
  args = ARG_SPECS[name]
  page, tile = args.page_size, tiles.find_tile(args.kv_heads, args.page_size, 64).tokens
  lengths = [0, 1, page - 1, page, page + 1, tile, tile + 1, 4 * tile - 1, 3000, 5000]
  run = jax.jit(api.decode_attention)
  for number in range(0, len(lengths), args.batch):
    tokens = np.resize(lengths[number:], args.batch)
    operands = _batch(args, tokens, seed=number)
    _assert_close(run(*operands), reference.attend(*operands))
