"""The contract of page stores over an object store that machines share."""

import time

import numpy as np
import pytest

from strata_jax.tiers import page_store
from tests.tiers.page_store_contract import PAGE_BYTES, Medium, PageStoreContract
from tests.tiers.store_pages import check_read, keys_of, pages_of


class TestS3(PageStoreContract):
  effort = 4

  @pytest.fixture
  def medium(self, s3_bucket):
    medium = Medium(s3_bucket, kind="values")
    yield medium
    medium.close()


def test_a_server_that_is_gone_gives_misses_soon(caplog):
  spec = '{"driver": "s3", "bucket": "none", "endpoint": "http://127.0.0.1:9"}'
  store = page_store.open_store(spec, page_bytes=PAGE_BYTES, fingerprint="model")
  keys = keys_of("a", 3)
  began_s = time.monotonic()
  assert store.longest_prefix(keys) == 0
  assert not check_read(store, keys).any()
  with pytest.raises(OSError, match="cannot be written"):
    store.write(keys, pages_of(keys, PAGE_BYTES)).result(timeout=60)
  assert time.monotonic() - began_s < 60
  assert store.stats["failed_reads"] > 0
  assert store.stats["failed_writes"] == 3
  assert np.count_nonzero(["cannot be" in record.message for record in caplog.records]) >= 2
  store.close()
