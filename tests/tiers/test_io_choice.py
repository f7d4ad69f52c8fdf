import json

import jax.numpy as jnp
import pytest

from strata_jax.tiers import io_choice, io_reference, layout
from tests.tiers import io_contract

LAYOUT = layout.PageLayout(num_layers=2, page_size=1, kv_heads=1, head_dim=128)  # pages of 2 KiB


def rate(backend, gbps, *, direction="load", page_bytes=2048, call_bytes=2048):
  return io_choice.Rate(
    backend=backend,
    direction=direction,
    page_bytes=page_bytes,
    call_bytes=call_bytes,
    gbps=gbps,
  )


TABLE = (
  rate("kernel", 5.0),
  rate("copy_engine", 1.0),
  rate("kernel", 50.0, page_bytes=1 << 20, call_bytes=1 << 28),
  rate("copy_engine", 52.0, page_bytes=1 << 20, call_bytes=1 << 28),
  rate("kernel", 50.0, direction="store"),
)


def test_the_fastest_at_the_nearest_sizes_is_chosen():
  assert io_choice.choose(TABLE, "load", 4096, 4096) == "kernel"
  assert io_choice.choose(TABLE, "load", 1 << 19, 1 << 27) == "copy_engine"
  assert io_choice.choose(TABLE, "store", 1 << 19, 1 << 27) == "kernel"


def test_a_direction_without_rows_is_an_error():
  with pytest.raises(ValueError, match="direction: expected one that the table has"):
    io_choice.choose(TABLE[:2], "store", 1, 1)


def test_the_table_of_the_package_has_both_directions_of_all_candidates():
  table = io_choice.read_table()
  for direction in ("load", "store"):
    found = {row.backend for row in table if row.direction == direction}
    assert found == set(io_choice.CANDIDATES)


def test_a_table_with_other_fields_is_refused(tmp_path):
  path = tmp_path / "table.json"
  path.write_text(json.dumps({"rows": [{"backend": "kernel"}]}))
  with pytest.raises(ValueError, match="row 0: expected the fields"):
    io_choice.read_table(path)


class Named(io_reference.ReferenceIo):
  """Notes which back end was called."""

  def __init__(self, name, calls):
    super().__init__(LAYOUT)
    self.called, self.calls = name, calls

  def load(self, *args):
    self.calls.append((self.called, "load"))
    return super().load(*args)

  def load_layer(self, *args):
    self.calls.append((self.called, "load_layer"))
    return super().load_layer(*args)

  def store(self, *args):
    self.calls.append((self.called, "store"))
    return super().store(*args)


def test_every_direction_goes_to_its_own_back_end():
  calls = []
  backends = {name: Named(name, calls) for name in io_choice.CANDIDATES}
  table = (rate("copy_engine", 9.0), rate("kernel", 9.0, direction="store"))
  auto = io_choice.ChosenIo(LAYOUT, backends, table)
  host, device, _, _ = io_contract.pools(LAYOUT)
  here, there, count = io_contract.slots([1, 2]), io_contract.slots([3, 4]), jnp.int32(2)
  device = auto.load(host, device, here, there, count)
  host = auto.store(device, host, there, here, count)
  auto.load_layer(host, device[1], 1, here, there, count)
  assert calls == [("copy_engine", "load"), ("kernel", "store"), ("copy_engine", "load_layer")]


@pytest.mark.gpu
class TestAutoIo(io_contract.IoContract):
  name = "auto"
