"""A step's loads as one list of pages, cut into a share for each batch that they run beside."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from strata_jax.executors import protocol


class Share(NamedTuple):
  """Pages that one call moves."""

  host_slots: np.ndarray  # int32, ascending
  device_slots: np.ndarray  # int32


def cut(
  loads: Sequence[protocol.LoadWork], weights: Sequence[int], largest: int
) -> tuple[Share, ...]:
  """The pages of all loads in shares by weight, none over `largest` pages.

  Args:
    loads: of a step.
    weights: how much compute each batch of the step has, all >= 1.
    largest: pages of a share at most.

  Returns:
    A share for each weight, and a last one with what was left over.
  """
  host = np.concatenate([load.host_slots for load in loads])
  device = np.concatenate([load.device_slots for load in loads])
  ends = np.cumsum(np.asarray(weights, np.int64)) * len(host) // sum(weights)
  counts = np.minimum(np.diff(ends, prepend=0), largest)
  edges = np.cumsum(counts)
  parts = zip(np.split(host, edges), np.split(device, edges), strict=True)
  return tuple(_ascending(*part) for part in parts)


def spread(loads: Sequence[protocol.LoadWork], steps: int) -> list[tuple[protocol.LoadWork, ...]]:
  """The loads cut into as many parts as there are decode steps to run them beside."""
  parts = [
    tuple(
      dataclasses.replace(load, host_slots=host, device_slots=device)
      for host, device in zip(
        np.array_split(load.host_slots, steps), np.array_split(load.device_slots, steps),
        strict=True,
      )
    )
    for load in loads
  ]  # fmt: skip
  return list(zip(*parts, strict=True)) if parts else [()] * steps


def _ascending(host_slots: np.ndarray, device_slots: np.ndarray) -> Share:
  """Neighbours in host memory share page tables: in this order they load fastest."""
  order = np.argsort(host_slots, kind="stable")
  return Share(host_slots[order], device_slots[order])
