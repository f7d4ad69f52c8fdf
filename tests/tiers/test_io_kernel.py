import pytest

from tests.tiers import io_contract


@pytest.mark.gpu
class TestKernelIo(io_contract.IoContract):
  name = "kernel"
