import jax
import numpy as np
import pytest

from strata_jax.tiers import device, host, io_pair, layout

_LAYOUT = layout.PageLayout(num_layers=2, page_size=4, kv_heads=1, head_dim=8, dtype="float32")


def test_each_direction_goes_to_its_own_back_end():
  pair = io_pair.make_io("reference", "device_put", _LAYOUT)
  assert pair.name == "reference/device_put"
  target = jax.devices()[0]
  pools = tuple(
    pool.at[1].set(float(layer + 1))
    for layer, pool in enumerate(device.make_device_pool(_LAYOUT, 3, target))
  )
  host_pool = host.make_host_pool(_LAYOUT, 3, target)
  slots = lambda *values: jax.device_put(np.array(values, np.int32))
  host_pool = pair.store(pools, host_pool, slots(1), slots(2), np.int32(1))
  pools = pair.load(host_pool, pools, slots(2), slots(0), np.int32(1))
  for layer, pool in enumerate(pools):
    np.testing.assert_array_equal(np.asarray(pool[0]), layer + 1)
  first = pair.load_layer(host_pool, pools[0], 0, slots(2), slots(2), np.int32(1))
  np.testing.assert_array_equal(np.asarray(first[2]), 1.0)


def test_calls_are_told_apart():
  calls = []

  class Spy:
    def __init__(self, name):
      self.name = name

    def __getattr__(self, direction):
      return lambda *args: calls.append((self.name, direction))

  pair = io_pair.PairIo(Spy("a"), Spy("b"))
  pair.load(*[None] * 5)
  pair.store(*[None] * 5)
  pair.load_layer(None, None, 0, None, None, None)
  assert calls == [("a", "load"), ("b", "store"), ("a", "load_layer")]


def test_one_back_end_for_both_is_not_wrapped():
  assert io_pair.make_io("reference", "reference", _LAYOUT).name == "reference"
  with pytest.raises(ValueError, match="I/O back end: expected one of"):
    io_pair.make_io("reference", "pigeon", _LAYOUT)
