"""cuDNN's path: lowered for CUDA anywhere, against the plain reference on a GPU.

JAX wants real devices to lower cuDNN's primitive, so it is not lowered for a named GPU: what kind
it is does not matter before XLA compiles the call.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import attention
from strata_jax.attention import cudnn, merge, xla
from strata_jax.attention.arg_specs import ARG_SPECS, ArgSpec
from tests.attention import test_xla
from tests.pallas_kernels import lowering

_attend = jax.jit(attention.paged_attention, static_argnames="implementation")
_attend_unwritten = jax.jit(attention.unwritten_attention, static_argnames="implementation")
_cudnn = jax.jit(functools.partial(attention.paged_attention, implementation="cudnn"))
_SMALL = ArgSpec(
  heads=4, kv_heads=2, head_dim=64, page_size=4, chunk=8, starts=(9, 0), lengths=(8, 5)
)


def shapes(spec: ArgSpec, dtype=jnp.bfloat16):
  batch, width = len(spec.starts), -(-(max(spec.starts) + spec.chunk) // spec.page_size)
  make = lambda shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
  kv = make((batch, spec.chunk, spec.kv_heads, spec.head_dim))
  return (
    make((batch, spec.chunk, spec.heads, spec.head_dim)),
    kv,
    kv,
    make((1000, 2, spec.page_size, spec.kv_heads, spec.head_dim)),
    make((batch, width), jnp.int32),
    make((batch,), jnp.int32),
    make((batch,), jnp.int32),
  )


@pytest.mark.parametrize("name", [name for name in ARG_SPECS if "llama31_8b" in name])
def test_lowers_to_fused_calls_over_the_pool_where_it_lies(name):
  text = lowering.lower(_cudnn, *shapes(ARG_SPECS[name]))
  calls = [line for line in text.splitlines() if "__cudnn$fmha" in line]
  paged = [line for line in calls if r"\22is_paged_attention\22: true" in line]
  assert len(paged) == 1
  assert r"\22mask_type\22: \22PADDING\22" in paged[0]
  assert "2000x" in paged[0]  # K and V side by side: two blocks a page
  if ARG_SPECS[name].chunk == 1:
    assert calls == paged
  else:
    (chunk,) = set(calls) - set(paged)
    assert r"\22mask_type\22: \22CAUSAL\22" in chunk
  assert "gather" not in text  # no page is copied


@pytest.mark.parametrize(
  ("change", "dtype", "match"),
  [
    ({}, jnp.float32, "q: expected bfloat16, got float32"),
    ({"head_dim": 12}, jnp.bfloat16, "head_dim: expected a multiple of 8, at most 256, got 12"),
  ],
)
def test_what_cudnn_does_not_take_is_refused(change, dtype, match):
  spec = dataclasses.replace(_SMALL, **change)
  with pytest.raises(ValueError, match=match):
    _cudnn.trace(*shapes(spec, dtype))


def _emulated_call(q, k, v, mask, lengths, tables, *, stats):
  """What cuDNN's kernel is asked for: [B, T, heads, D] and the log-sum-exp [B, heads, T]."""
  del mask
  batch, rows, heads, head_dim = q.shape
  assert (np.asarray(lengths[0]) == rows).all()
  keys, values = (
    jnp.repeat(blocks[table[:, 0, :, 0]].astype(jnp.float32), heads // blocks.shape[2], axis=3)
    .reshape(batch, -1, heads, head_dim)
    for blocks, table in zip((k, v), tables, strict=True)
  )  # fmt: skip
  scores = jnp.einsum("bthd,bshd->bhts", q.astype(jnp.float32), keys) * head_dim**-0.5
  seen = jnp.arange(keys.shape[1]) < lengths[1][:, None]
  scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
  out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), values)
  return [out, jax.scipy.special.logsumexp(scores, axis=-1)][: 1 + stats]


@pytest.mark.parametrize("chunk", [2, 3])
@pytest.mark.parametrize(("packed", "part_tokens"), [(True, 16), (True, 1024), (False, 16)])
def test_packed_queries_and_contexts_in_parts_are_the_same(monkeypatch, chunk, packed, part_tokens):
  starts, lengths = (0, 5, 41, 63, 0), (1, 1, min(chunk, 2), 1, 0)
  arguments = test_xla.case(0, 4, starts, lengths, chunk, 8, 2, 16, "bfloat16")
  q, _, _, pool, table, *_ = arguments
  monkeypatch.setattr(cudnn, "_call", _emulated_call)
  chunk_part = lambda q, k, v: xla.chunk_part(xla._group_queries(q, 2), k, v)

  def dense_chunk(q, k, v):
    out, lse = chunk_part(q, k, v)
    out = out.reshape(len(q), 2, 4, chunk, 16).transpose(0, 3, 1, 2, 4).reshape(q.shape)
    return merge.Partial(out, lse.reshape(len(q), 8, chunk).swapaxes(1, 2))

  monkeypatch.setattr(cudnn, "_chunk_part", dense_chunk)
  monkeypatch.setattr(cudnn, "_PART_TOKENS", part_tokens)
  if not packed:
    monkeypatch.setattr(cudnn, "_packs", lambda *shapes: False)
  parts = cudnn.context_parts(q.shape, pool.shape, table.shape[1])
  assert (parts > 2) == (part_tokens == 16)
  want = np.asarray(_attend(*arguments, implementation="reference"), np.float32)
  got = np.asarray(cudnn.paged_attention(*arguments), np.float32)
  assert np.isfinite(got).all()
  for row, length in enumerate(lengths):
    np.testing.assert_allclose(got[row, :length], want[row, :length], atol=2e-2)


def test_only_small_batches_of_long_contexts_are_cut():
  parts = lambda batch, chunk, tokens: cudnn.context_parts(
    (batch, chunk, 32, 128), (100, 2, 16, 8, 128), tokens // 16
  )
  assert parts(1, 1, 20480) == 1  # the kernel for single tokens sees to it itself
  assert parts(1, 32, 20480) == 8  # queries of a KV head share a tile
  assert parts(4, 32, 20480) == 4
  assert parts(16, 32, 20480) == 1
  assert parts(1, 128, 20480) == 4
  assert parts(16, 128, 20480) == parts(1, 2048, 20480) == 1
  assert parts(1, 32, 1024) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARG_SPECS)
def test_parity(name):
  spec = ARG_SPECS[name]
  arguments = test_xla.case(
    0, spec.page_size, spec.starts, spec.lengths, spec.chunk, spec.heads, spec.kv_heads,
    spec.head_dim, "bfloat16",
  )  # fmt: skip
  got = np.asarray(_attend(*arguments, implementation="cudnn"), np.float32)
  want = np.asarray(_attend(*arguments, implementation="reference"), np.float32)
  after = np.asarray(_attend_unwritten(*arguments, implementation="cudnn"), np.float32)
  assert np.isfinite(got).all()
  for row, length in enumerate(spec.lengths):
    np.testing.assert_allclose(got[row, :length], want[row, :length], atol=2e-2)
    np.testing.assert_allclose(after[row, :length], want[row, :length], atol=2e-2)
