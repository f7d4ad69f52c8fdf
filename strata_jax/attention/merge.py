"""Partial attention results over disjoint keys, and how two of them make one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

NOTHING = -1e30  # the log-sum-exp of no key at all: finite, so that differences are no NaN


class Partial(NamedTuple):
  """Attention of queries over some of their keys."""

  out: jax.Array  # float32 [..., head_dim], normalised over these keys
  lse: jax.Array  # float32 [...], log of the sum of exp(scores); NOTHING without keys


def merge(a: Partial, b: Partial) -> Partial:
  """Attention over the keys of both.

  With lse = log(exp(a.lse) + exp(b.lse)): out = exp(a.lse - lse) a.out + exp(b.lse - lse) b.out.
  Exact up to rounding, and a part without keys has no weight.
  """
  high = jnp.maximum(a.lse, b.lse)
  wa, wb = jnp.exp(a.lse - high), jnp.exp(b.lse - high)
  total = wa + wb
  out = (wa / total)[..., None] * a.out + (wb / total)[..., None] * b.out
  return Partial(out, high + jnp.log(total))


def merge_all(parts: Partial, axis: int) -> Partial:
  """`merge` of all the parts that stand side by side along an axis of both arrays."""
  high = jnp.max(parts.lse, axis=axis, keepdims=True)
  weights = jnp.exp(parts.lse - high)
  total = jnp.sum(weights, axis=axis, keepdims=True)
  out = jnp.sum((weights / total)[..., None] * parts.out, axis=axis)
  return Partial(out, jnp.squeeze(high + jnp.log(total), axis))
