"""What is lowered once, apart by function, shapes, dtypes and what is static; in threads."""

import threading

import flax.struct
import jax
import jax.numpy as jnp
import pytest

from strata_jax.pallas_kernels import lowered_once

SETTING = "jax_export_ignore_forward_compatibility"


@pytest.fixture(autouse=True)
def _empty():
  yield
  lowered_once._exported.cache_clear()


@flax.struct.dataclass
class Operand:
  x: jax.Array
  term: int = flax.struct.field(pytree_node=False, default=0)


def _call(function, size: int, dtype=jnp.float32, term: int = 0) -> None:
  operand = Operand(jax.ShapeDtypeStruct((size,), dtype), term)
  jax.eval_shape(lambda operand: lowered_once.call(function, operand), operand)


def test_what_is_apart():
  traced = []

  def add(operand):
    traced.append((operand.x.shape, operand.x.dtype.name, operand.term))
    return operand.x + operand.term

  def other(operand):
    return add(operand.replace(term=-operand.term))

  other.__name__ = other.__qualname__ = "add"
  for _ in range(2):
    _call(add, 2, term=1)
    _call(add, 3, term=1)
    _call(add, 2, jnp.bfloat16, term=1)
    _call(add, 2, term=2)
    _call(other, 2, term=1)
  assert traced == [
    ((2,), "float32", 1), ((3,), "float32", 1), ((2,), "bfloat16", 1), ((2,), "float32", 2),
    ((2,), "float32", -1),
  ]  # fmt: skip


def test_threads_leave_the_settings_as_they_were():
  before = getattr(jax.config, SETTING)
  seen, second_began, first_ended = [], threading.Event(), threading.Event()

  def slow(operand):
    x = operand.x
    if x.shape == (2,):
      second.start()
      second_began.wait(0.2)  # in vain, as threads take turns
    else:
      second_began.set()
      first_ended.wait(5)
    seen.append(getattr(jax.config, SETTING))
    return x

  second = threading.Thread(target=_call, args=(slow, 3))
  _call(slow, 2)
  first_ended.set()
  second.join()
  assert seen == [True, True]
  assert getattr(jax.config, SETTING) == before
