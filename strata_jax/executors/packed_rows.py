"""All that a batch is told about its rows, in one array: one transfer to the device for all of it.

A transfer of its own costs the host more than the bytes do, and the device waits meanwhile.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.executors import layer_stack, programs

_NUMBERS = 5  # of a row, besides its tokens and its page table


class Draws(NamedTuple):
  """How the next token of each row is drawn; see `sampling.sample`."""

  temperatures: jax.Array  # float32 [B]
  seeds: jax.Array  # uint32 [B]
  indices: jax.Array  # int32 [B]


class PackedRows:
  """Rows of a batch on the host, all zero at first; the views are there to be filled in.

  Once it was `put` the array belongs to the device: nobody may write to it any more.
  """

  def __init__(self, rows: int, tokens: int, pages: int) -> None:
    """Makes rows of `tokens` token ids and page tables of `pages`."""
    self._tokens = tokens
    self._array = np.zeros((rows, tokens + pages + _NUMBERS), np.int32)
    numbers = self._array[:, tokens + pages :].T
    self.token_ids = self._array[:, :tokens]  # [B, T]
    self.table = self._array[:, tokens : tokens + pages]  # [B, N]
    self.starts, self.lengths, self.indices = numbers[:3]  # [B] each
    self.temperatures = numbers[3].view(np.float32)  # [B]
    self.seeds = numbers[4].view(np.uint32)  # [B]

  def put(self, device: jax.Device) -> tuple[layer_stack.Batch, Draws]:
    """The rows on a device."""
    with jax.transfer_guard_host_to_device("allow"):
      return _unpack_on(device)(self._array, self._tokens)


def structs(rows: int, tokens: int, pages: int, device: jax.Device) -> tuple[Any, Any]:
  """What `PackedRows.put` gives, as shapes: a Batch and Draws of `jax.ShapeDtypeStruct`."""
  sharding = jax.sharding.SingleDeviceSharding(device)
  found = _unpack_on(device).eval_shape(_packed(rows, tokens, pages), tokens)
  return programs.shapes_on(sharding, found)


def lower(rows: int, tokens: int, pages: int, device: jax.Device) -> jax.stages.Lowered:
  """The program of `PackedRows.put`."""
  return _unpack_on(device).lower(_packed(rows, tokens, pages), tokens)


def lower_advance(batch: layer_stack.Batch, draws: Draws) -> jax.stages.Lowered:
  """The program of `advance`."""
  return _next.lower(batch.starts, draws.indices)


def _packed(rows: int, tokens: int, pages: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((rows, tokens + pages + _NUMBERS), np.int32)


def advance(
  batch: layer_stack.Batch, draws: Draws, token_ids: jax.Array
) -> tuple[layer_stack.Batch, Draws]:
  """The rows of the decode step behind this one, which sampled `token_ids` [B, 1]."""
  starts, indices = _next(batch.starts, draws.indices)
  return batch._replace(token_ids=token_ids, starts=starts), draws._replace(indices=indices)


@jax.jit
def _next(starts: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
  return starts + 1, indices + 1


def _unpack(array: jax.Array, tokens: int) -> tuple[layer_stack.Batch, Draws]:
  token_ids, table, numbers = jnp.split(array, [tokens, array.shape[1] - _NUMBERS], axis=1)
  starts, lengths, indices, temperatures, seeds = numbers.T
  draws = Draws(
    jax.lax.bitcast_convert_type(temperatures, jnp.float32),
    jax.lax.bitcast_convert_type(seeds, jnp.uint32),
    indices,
  )
  return layer_stack.Batch(token_ids, table, starts, lengths), draws


@functools.cache
def _unpack_on(device: jax.Device):
  """`_unpack` of an array on the host; takes it to the device faster than `jax.device_put`."""
  sharding = jax.sharding.SingleDeviceSharding(device)
  return jax.jit(_unpack, static_argnums=1, in_shardings=sharding)
