import pytest

from strata_jax.tiers import io_memcpy_async
from tests.tiers import cpu_driver, io_contract


class TestMemcpyAsyncCopies(io_contract.IoContract):
  """The copies that the back end asks for, carried out on the CPU."""

  @pytest.fixture(autouse=True)
  def _cpu(self, monkeypatch):
    cpu_driver.install(monkeypatch)

  def backend(self, page_layout):
    return io_memcpy_async.MemcpyAsyncIo(page_layout)


@pytest.mark.gpu
class TestMemcpyAsyncIo(io_contract.IoContract):
  name = "memcpy_async"
