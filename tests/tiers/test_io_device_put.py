from tests.tiers import io_contract


class TestDevicePutIo(io_contract.IoContract):
  name = "device_put"
