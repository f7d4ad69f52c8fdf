import pytest

from tests.tiers import io_contract


class TestDevicePutIo(io_contract.IoContract):
  name = "device_put"


@pytest.mark.gpu
class TestDevicePutIoOnAGpu(io_contract.IoContract):
  name = "device_put"
