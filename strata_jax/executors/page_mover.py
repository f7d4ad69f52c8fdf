"""Pages moved by programs of the compute's own stream, in calls of padded lists."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from strata_jax.executors import buckets as buckets_lib
from strata_jax.tiers import io_auto, io_backend, layout

# Back ends all of whose transfers are explicit. The others read their slots on the host.
_EXPLICIT = ("kernel", "reference")

Lists = tuple[jax.Array, jax.Array, jax.Array]  # count int32 [], sources and targets int32 [bucket]


class PageMover:
  """Loads by one back end, stores by the same or another one."""

  def __init__(
    self,
    page_layout: layout.PageLayout,
    load: str,
    store: str,
    buckets: buckets_lib.Buckets,
    target: jax.Device,
  ) -> None:
    """Makes the back ends.

    Args:
      page_layout: of the pools.
      load: the back end of loads by name.
      store: that of stores.
      buckets: the sizes of lists.
      target: where the lists go.

    Raises:
      ValueError: see `io_auto.make_io_backend`.
    """
    self._loads = io_auto.make_io_backend(load, page_layout)
    self._stores = self._loads if store == load else io_auto.make_io_backend(store, page_layout)
    self._buckets = buckets
    self._target = target

  def load(
    self,
    host: io_backend.HostPool,
    device: io_backend.DevicePool,
    host_slots: np.ndarray,
    device_slots: np.ndarray,
  ) -> io_backend.DevicePool:
    """The device pool, donated, with pages of the host, int32 [pages] both, in all layers."""
    for lists in self._pieces(host_slots, device_slots):
      device = self._load(host, device, lists)
    return device

  def store(
    self,
    device: io_backend.DevicePool,
    host: io_backend.HostPool,
    device_slots: np.ndarray,
    host_slots: np.ndarray,
  ) -> Iterator[io_backend.HostPool]:
    """The host pool, donated, after each call; int32 [pages] both."""
    for lists in self._pieces(device_slots, host_slots):
      host = self._store(device, host, lists)
      yield host

  def warm(
    self, device: io_backend.DevicePool, host: io_backend.HostPool, pages: int
  ) -> tuple[io_backend.DevicePool, io_backend.HostPool]:
    """Compiles the calls of lists of `pages`; both pools are donated.

    A back end that reads its lists does nothing for an empty one. With one of those, host page 0
    is moved to device page 0 and back.
    """
    moved = any(backend.name not in _EXPLICIT for backend in (self._loads, self._stores))
    lists = self._put((np.int32(moved), *np.zeros((2, pages), np.int32)))
    device = self._load(host, device, lists)
    return device, self._store(device, host, lists)

  def _load(
    self, host: io_backend.HostPool, device: io_backend.DevicePool, lists: Lists
  ) -> io_backend.DevicePool:
    count, sources, targets = lists
    with _guard(self._loads):
      return self._loads.load(host, device, sources, targets, count)

  def _store(
    self, device: io_backend.DevicePool, host: io_backend.HostPool, lists: Lists
  ) -> io_backend.HostPool:
    count, sources, targets = lists
    with _guard(self._stores):
      return self._stores.store(device, host, sources, targets, count)

  def _pieces(self, sources: np.ndarray, targets: np.ndarray) -> Iterator[Lists]:
    first = 0
    for count, bucket in self._buckets.transfer_pieces(len(sources)):
      lists = np.zeros((2, bucket), np.int32)
      lists[0, :count] = sources[first : first + count]
      lists[1, :count] = targets[first : first + count]
      first += count
      yield self._put((np.int32(count), lists[0], lists[1]))

  def _put(self, tree: Any) -> Any:
    return jax.device_put(tree, self._target)


def _guard(backend: io_backend.IoBackend) -> contextlib.AbstractContextManager[None]:
  if backend.name in _EXPLICIT:
    return contextlib.nullcontext()
  return jax.transfer_guard("allow")
