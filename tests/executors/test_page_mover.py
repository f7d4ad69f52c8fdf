"""Pages by padded lists: each direction by its own back end, and warm pools that keep the host."""

import jax
import numpy as np
import pytest

from strata_jax.executors import buckets, page_mover
from strata_jax.tiers import device, host, layout

LAYOUT = layout.PageLayout(num_layers=2, page_size=4, kv_heads=1, head_dim=8, dtype="float32")
BUCKETS = buckets.Buckets(
  chunk_tokens=(16,), decode_requests=(1,), transfer_pages=(2, 4), table_pages=4
)


def make(load="reference", store="device_put"):
  return page_mover.PageMover(LAYOUT, load, store, BUCKETS, jax.devices()[0])


def pools():
  """Device page p of layer l holds 10 l + p, the host nothing."""
  made = tuple(
    pool + (10 * layer + np.arange(9, dtype=np.float32)).reshape(9, 1, 1, 1, 1)
    for layer, pool in enumerate(device.make_device_pool(LAYOUT, 9))
  )
  return made, host.make_host_pool(LAYOUT, 9)


def numbers(pool_of_device):
  return [np.asarray(layer)[:, 0, 0, 0, 0].tolist() for layer in pool_of_device]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the back ends of a CPU")
def test_there_and_back_in_pieces(monkeypatch):
  calls = []
  mover = make()
  for name, backend in (("load", mover._loads), ("store", mover._stores)):
    assert backend.name == ("reference" if name == "load" else "device_put")
    call = getattr(backend, name)
    noted = lambda *args, name=name, call=call: (calls.append((name, len(args[2]))), call(*args))[1]
    monkeypatch.setattr(backend, name, noted)
  device_pool, host_pool = pools()
  sources, targets = np.array([8, 1, 5, 2, 7]), np.array([0, 3, 4, 8, 6])
  with jax.transfer_guard("disallow"):
    *_, host_pool = mover.store(device_pool, host_pool, sources, targets)
    back = np.array([6, 5, 3, 2, 0])
    device_pool = mover.load(host_pool, device_pool, targets, back)
  assert calls == [("store", 4), ("store", 2), ("load", 4), ("load", 2)]
  want = np.arange(9)
  want[back] = sources
  assert numbers(device_pool) == [want.tolist(), (10 + want).tolist()]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the back ends of a CPU")
def test_warming_up_keeps_what_the_host_holds():
  device_pool, host_pool = pools()
  mover = make()
  (host_pool,) = mover.store(device_pool, host_pool, np.array([4]), np.array([0]))
  before = host.read_pages(host_pool, np.arange(9))
  with jax.transfer_guard("disallow"):
    device_pool, host_pool = mover.warm(device_pool, host_pool, 2)
  np.testing.assert_array_equal(host.read_pages(host_pool, np.arange(9)), before)
  assert numbers(device_pool)[0][1:] == list(range(1, 9))


def test_an_unknown_back_end_is_refused():
  with pytest.raises(ValueError, match=r"I/O back end: expected one of .*, got 'pigeon'"):
    make(store="pigeon")
