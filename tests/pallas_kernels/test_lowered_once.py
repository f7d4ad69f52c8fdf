"""What is lowered once, apart by function, shapes, dtypes and static arguments; in threads."""

import functools
import threading

import jax
import jax.numpy as jnp
import pytest

from strata_jax.pallas_kernels import lowered_once

SETTING = "jax_export_ignore_forward_compatibility"


@pytest.fixture(autouse=True)
def _empty():
  yield
  lowered_once._exported.cache_clear()


def _call(function, size: int, dtype=jnp.float32, **static) -> None:
  call = functools.partial(lowered_once.call, function, **static)
  jax.eval_shape(call, jax.ShapeDtypeStruct((size,), dtype))


def test_what_is_apart():
  traced = []

  def add(x, *, term):
    traced.append((x.shape, x.dtype.name, term))
    return x + term

  def other(x, *, term):
    return add(x, term=-term)

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

  def slow(x):
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
