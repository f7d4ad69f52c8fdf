"""The `auto` back end: picks one by a table of measured rates.

`python -m experiments.io_bandwidth --renew_auto_table` measures the table anew.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

import jax

from strata_jax.tiers import io_backend, layout

TABLE_PATH = pathlib.Path(__file__).with_name("io_auto_table.json")
CANDIDATES = ("kernel", "copy_engine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
  """One measurement.

  Attributes:
    backend: its name.
    direction: "load" or "store".
    page_bytes: bytes of a page, all layers.
    call_bytes: bytes of a whole call.
    gbps: GB/s.
  """

  backend: str
  direction: str
  page_bytes: int
  call_bytes: int
  gbps: float


def read_table(path: pathlib.Path = TABLE_PATH) -> tuple[Rate, ...]:
  """Reads the table. Raises ValueError if a row lacks a field or has one too many."""
  rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
  fields = {field.name for field in dataclasses.fields(Rate)}
  for number, row in enumerate(rows):
    if set(row) != fields:
      raise ValueError(
        f"{path}, row {number}: expected the fields {sorted(fields)}, got {sorted(row)}"
      )
  return tuple(Rate(**row) for row in rows)


def choose(table: Sequence[Rate], direction: str, page_bytes: int, call_bytes: int) -> str:
  """The back end with the highest rate at the measured sizes closest to those of a call.

  Raises:
    ValueError: the table has no row for the direction.
  """
  rows = [row for row in table if row.direction == direction]
  if not rows:
    raise ValueError(f"direction: expected one that the table has, got {direction!r}")
  distance = lambda row: (
    abs(math.log(row.page_bytes / page_bytes)) + abs(math.log(row.call_bytes / call_bytes))
  )
  nearest = min(map(distance, rows))
  return max((row for row in rows if distance(row) == nearest), key=lambda row: row.gbps).backend


class ChosenIo:
  """`IoBackend` that hands every call to the fastest of several; buckets stand for sizes."""

  name = "auto"

  def __init__(
    self,
    page_layout: layout.PageLayout,
    backends: Mapping[str, io_backend.IoBackend],
    table: Sequence[Rate],
  ) -> None:
    self.layout = page_layout
    self._backends = backends
    self._table = tuple(row for row in table if row.backend in backends)

  def choice(self, direction: str, pages: int) -> str:
    """The back end for calls with buckets of `pages` pages."""
    page_bytes = self.layout.page_bytes
    return choose(self._table, direction, page_bytes, max(pages, 1) * page_bytes)

  def load(
    self,
    host: io_backend.HostPool,
    device: io_backend.DevicePool,
    host_slots: io_backend.Slots,
    device_slots: io_backend.Slots,
    count: io_backend.Count,
  ) -> io_backend.DevicePool:
    """See `IoBackend.load`."""
    backend = self._backends[self.choice("load", host_slots.shape[0])]
    return backend.load(host, device, host_slots, device_slots, count)

  def load_layer(
    self,
    host: io_backend.HostPool,
    device_layer: jax.Array,
    layer: int,
    host_slots: io_backend.Slots,
    device_slots: io_backend.Slots,
    count: io_backend.Count,
  ) -> jax.Array:
    """See `IoBackend.load_layer`: what it copies is a fragment, not a page."""
    pages = max(host_slots.shape[0], 1)
    fragment_bytes = self.layout.fragment_bytes
    name = choose(self._table, "load", fragment_bytes, pages * fragment_bytes)
    return self._backends[name].load_layer(
      host, device_layer, layer, host_slots, device_slots, count
    )

  def store(
    self,
    device: io_backend.DevicePool,
    host: io_backend.HostPool,
    device_slots: io_backend.Slots,
    host_slots: io_backend.Slots,
    count: io_backend.Count,
  ) -> io_backend.HostPool:
    """See `IoBackend.store`."""
    backend = self._backends[self.choice("store", host_slots.shape[0])]
    return backend.store(device, host, device_slots, host_slots, count)
