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
