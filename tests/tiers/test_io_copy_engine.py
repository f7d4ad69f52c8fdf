import functools

import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.pallas_kernels.layout_convert import api
from strata_jax.tiers import io_copy_engine
from tests.tiers import cpu_driver, io_contract


class TestCopyEngineCopies(io_contract.IoContract):
  """The copies that the back end asks for, carried out on the CPU."""

  @pytest.fixture(autouse=True)
  def _cpu(self, monkeypatch):
    cpu_driver.install(monkeypatch)
    for name in ("pages_to_layers", "layers_to_pages"):
      call = functools.partial(getattr(api, name), implementation="reference")
      monkeypatch.setattr(api, name, call)

  def backend(self, page_layout):
    return io_copy_engine.CopyEngineIo(page_layout, staging_bytes=8 * page_layout.page_bytes)

  def test_a_list_longer_than_the_staging_buffer_takes_several_rounds(self):
    page_layout = self.layouts[1]
    backend = io_copy_engine.CopyEngineIo(page_layout, staging_bytes=3 * page_layout.page_bytes)
    host, device, host_bytes, device_bytes = io_contract.pools(page_layout)
    here, there = [9, 1, 2, 3, 4, 5, 6], [3, 0, 1, 2, 9, 8, 7]
    slots = io_contract.slots
    device = backend.load(host, device, slots(here), slots(there), jnp.int32(7))
    device_bytes[:, there] = host_bytes[here].swapaxes(0, 1)
    for layer, pool in enumerate(device):
      np.testing.assert_array_equal(io_contract.as_bytes(pool), device_bytes[layer].view(np.uint8))
    host = backend.store(device, host, slots(here), slots(there), jnp.int32(7))
    host_bytes[there] = device_bytes[:, here].swapaxes(0, 1)
    np.testing.assert_array_equal(io_contract.as_bytes(host), host_bytes.view(np.uint8))


@pytest.mark.gpu
class TestCopyEngineIo(io_contract.IoContract):
  name = "copy_engine"
