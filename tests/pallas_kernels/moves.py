"""Pools, lists of slots and what must come out, for the tests of the moving kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from strata_jax.tiers import layout


@dataclasses.dataclass(frozen=True)
class Lists:
  """Slots of a bucket; `reads` may repeat, `writes` do not."""

  reads: np.ndarray
  writes: np.ndarray
  count: int


def random_lists(
  rng: np.random.Generator, bucket: int, read_pages: int, write_pages: int, count: int | None = None
) -> Lists:
  """`count` random entries, then garbage; a random count if None."""
  count = int(rng.integers(0, bucket + 1)) if count is None else count
  garbage = rng.integers(-(2**31), 2**31, (2, bucket)).astype(np.int32)
  reads, writes = garbage
  reads[:count] = rng.integers(0, read_pages, count)
  writes[:count] = rng.permutation(write_pages)[:count]
  return Lists(reads=reads, writes=writes, count=count)


def random_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
  """Small integers, exact in every dtype of a layout."""
  return rng.integers(-100, 100, shape, dtype=np.int8).astype(jnp.dtype(dtype))


def random_pools(rng: np.random.Generator, page_layout: layout.PageLayout, host: int, device: int):
  """A page-first array of `host` pages and a tuple of layer-first arrays of `device` pages."""
  pages = random_values(rng, page_layout.host_shape(host), page_layout.dtype)
  layers = [
    random_values(rng, page_layout.device_shape(device), page_layout.dtype)
    for _ in range(page_layout.num_layers)
  ]
  return jnp.asarray(pages), tuple(jnp.asarray(pool) for pool in layers)


def assert_same(got, want) -> None:
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def races_found() -> bool:
  """Whether the interpreter saw a race in the kernel that it ran last."""
  return interpret_pallas_call.get_races().races_found
