"""Decode and short chunks by kernels, the rest by cuDNN: what each is handed, and all on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import attention
from strata_jax.attention import hopper
from strata_jax.attention.arg_specs import ARG_SPECS
from strata_jax.pallas_kernels import lowered_once
from strata_jax.pallas_kernels.chunk_attention import api as chunk_attention
from strata_jax.pallas_kernels.decode_attention import api as decode_attention
from tests.attention import test_cudnn, test_xla

_STARTS, _LENGTHS = (0, 5, 41, 63, 0), (1, 1, 1, 1, 0)


@pytest.mark.parametrize("written", [True, False])
def test_decode_is_the_reference(monkeypatch, written):
  by_jnp = functools.partial(decode_attention.decode_attention, implementation="reference")
  monkeypatch.setattr(decode_attention, "decode_attention", by_jnp)
  arguments = test_xla.case(0, 8, _STARTS, _LENGTHS, 1, 8, 2, 64, "bfloat16")
  want = np.asarray(attention.paged_attention(*arguments, implementation="reference"), np.float32)
  q, k, v, pool, table, *where = arguments
  if not written:  # the token's own KV must not be read
    pool = attention.write_kv(pool, jnp.full_like(k, jnp.nan), v, table, *where)
  got = np.asarray(hopper.paged_attention(q, k, v, pool, table, *where, written=written))
  assert got.shape == q.shape
  for row, length in enumerate(_LENGTHS):
    np.testing.assert_allclose(got[row, :length], want[row, :length], atol=2e-2)
  assert np.isfinite(got.astype(np.float32)).all()


def test_a_plan_made_before_is_the_one_that_would_be_made(monkeypatch):
  q, k, v, pool, table, starts, lengths = test_xla.case(
    0, 8, _STARTS, _LENGTHS, 1, 32, 8, 128, "bfloat16"
  )
  used = []

  def attend(q, pool, page_table, plan):
    used.append(plan)
    return q, jnp.zeros(q.shape[:2])

  monkeypatch.setattr(decode_attention, "_attend", attend)
  monkeypatch.setattr(lowered_once, "call", lambda function, *args, **how: function(*args, **how))
  sizes = {"chunk": 1, "heads": 32, "kv_heads": 8, "page_size": 8, "implementation": "hopper"}
  plan = attention.plan_reads(table, starts, lengths, **sizes)
  arguments = (q, k, v, pool, table, starts, lengths)
  attention.paged_attention(*arguments, implementation="hopper")
  attention.paged_attention(*arguments, implementation="hopper", plan=plan)
  assert used[1] is plan
  jax.tree.map(np.testing.assert_array_equal, *used)
  assert attention.plan_reads(table, starts, lengths, **(sizes | {"implementation": "xla"})) is None
  assert attention.plan_reads(table, starts, lengths, **(sizes | {"chunk": 65})) is None
  assert (
    attention.plan_reads(table, starts, lengths, **(sizes | {"page_size": 24, "chunk": 2})) is None
  )


@pytest.mark.parametrize("planned", [False, True])
def test_short_chunks_are_the_reference(monkeypatch, planned):
  """Padding among the rows and in them."""
  plans, attend = [], chunk_attention.chunk_attention

  def by_jnp(*args, plan):
    plans.append(plan)
    return attend(*args, implementation="reference")

  monkeypatch.setattr(chunk_attention, "chunk_attention", by_jnp)
  lengths = (3, 8, 1, 0, 5)
  arguments = test_xla.case(0, 8, _STARTS, lengths, 8, 8, 2, 64, "bfloat16")
  plan = None
  if planned:
    sizes = {"chunk": 8, "heads": 8, "kv_heads": 2, "page_size": 8, "implementation": "hopper"}
    plan = attention.plan_reads(*arguments[4:], **sizes)
    assert isinstance(plan, chunk_attention.Plan)
  want = np.asarray(attention.paged_attention(*arguments, implementation="reference"), np.float32)
  got = np.asarray(attention.paged_attention(*arguments, implementation="hopper", plan=plan))
  assert plans == [plan]
  for row, length in enumerate(lengths):
    np.testing.assert_allclose(got[row, :length], want[row, :length], atol=2e-2)
  assert np.isfinite(got.astype(np.float32)).all()


@pytest.mark.parametrize(
  ("page_size", "chunk", "written", "by_cudnn"),
  [(8, 64, True, False), (8, 64, False, True), (8, 65, True, True), (24, 4, True, True)],
)
def test_other_chunks_are_for_cudnn(monkeypatch, page_size, chunk, written, by_cudnn):
  seen = []
  monkeypatch.setattr(
    hopper.cudnn, "paged_attention", lambda *args, written: seen.append((len(args), written))
  )
  monkeypatch.setattr(chunk_attention, "chunk_attention", lambda *args, plan: None)
  arguments = test_xla.case(0, page_size, (9,), (3,), chunk, 8, 2, 64, "bfloat16")
  hopper.paged_attention(*arguments, written=written)
  assert seen == ([(7, written)] if by_cudnn else [])


def test_plans_of_the_other_kind_of_chunk_are_refused():
  for chunk, other in ((1, 4), (4, 1)):
    arguments = test_xla.case(0, 8, (9,), (1,), chunk, 8, 2, 64, "bfloat16")
    plan = hopper.plan_reads(*arguments[4:], chunk=other, heads=8, kv_heads=2, page_size=8)
    with pytest.raises(ValueError, match="plan: expected one of"):
      hopper.paged_attention(*arguments, plan=plan)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in ARG_SPECS if "page1-" not in n])
def test_parity(name):
  spec = ARG_SPECS[name]
  arguments = test_xla.case(
    0, spec.page_size, spec.starts, spec.lengths, spec.chunk, spec.heads, spec.kv_heads,
    spec.head_dim, "bfloat16",
  )  # fmt: skip
  want = np.asarray(test_cudnn._attend(*arguments, implementation="reference"), np.float32)
  for attend in (test_cudnn._attend, test_cudnn._attend_unwritten):
    got = np.asarray(attend(*arguments, implementation="hopper"), np.float32)
    assert np.isfinite(got).all()
    for row, length in enumerate(spec.lengths):
      np.testing.assert_allclose(got[row, :length], want[row, :length], atol=2e-2)
