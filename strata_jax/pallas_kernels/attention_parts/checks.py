"""What queries and pools have to be for a kernel of attention, whatever the chunk."""

import jax
import jax.numpy as jnp

_SHARED_MEMORY_BYTES = 226 << 10  # of a thread block on Hopper, less what the compiler takes


def check_fit(q: jax.Array | jax.ShapeDtypeStruct, pool: jax.Array | jax.ShapeDtypeStruct) -> None:
  """Checks q [..., heads, D] against pool [pages, 2, page_size, kv_heads, D].

  Raises:
    ValueError: they do not fit together.
  """
  if pool.ndim != 5 or pool.shape[1] != 2 or pool.shape[-1] != q.shape[-1]:
    raise ValueError(
      f"pool: expected [pages, 2, page_size, kv_heads, {q.shape[-1]}], got {pool.shape}"
    )
  if q.shape[-2] % pool.shape[3]:
    raise ValueError(f"heads: expected a multiple of {pool.shape[3]}, got {q.shape[-2]}")


def kind_problem(
  q: jax.Array | jax.ShapeDtypeStruct, pool: jax.Array | jax.ShapeDtypeStruct
) -> str:
  """What no kernel takes of their dtypes and heads, or nothing."""
  for name, array in (("q", q), ("pool", pool)):
    if array.dtype != jnp.bfloat16:
      return f"{name}: expected bfloat16, got {array.dtype}"
  if q.shape[-1] not in (64, 128):
    return f"head_dim: expected 64 or 128, got {q.shape[-1]}"
  return ""


def memory_problem(wanted_rows: int, head_dim: int, what: str) -> str:
  """Whether so many rows of bfloat16 are too many for a thread block on Hopper, or nothing."""
  wanted_bytes = wanted_rows * head_dim * 2
  if wanted_bytes <= _SHARED_MEMORY_BYTES:
    return ""
  return (
    f"stages: expected at most {_SHARED_MEMORY_BYTES} bytes of shared memory, got {wanted_bytes} "
    f"for {what}"
  )
