"""Several processes write, read, evict and compact one folder at once."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from strata_jax.tiers.orbax_segments import OrbaxSegments
from tests.tiers.share_worker import PAGE_BYTES, UNIVERSE
from tests.tiers.store_pages import check_read, keys_of


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [10])
def test_two_processes_over_one_folder(tmp_path, seconds):
  folder = str(tmp_path / "store")
  workers = [
    subprocess.Popen(
      [sys.executable, "-m", "tests.tiers.share_worker", folder, str(seed), str(seconds)],
      stdout=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    for seed in range(2)
  ]  # fmt: skip
  results = [json.loads(worker.communicate(timeout=seconds + 120)[0]) for worker in workers]
  assert [worker.returncode for worker in workers] == [0, 0]
  for result in results:
    assert result["read"] > 100
    assert result["hits"] > 0.2 * result["read"]
    assert result["bad_pages"] == 0
    assert result["failed_writes"] == 0
  store = OrbaxSegments(folder, page_bytes=PAGE_BYTES, fingerprint="model")
  right = check_read(store, keys_of("shared", UNIVERSE))
  usage = store.usage()
  assert usage.pages == np.count_nonzero(right) > 200
  assert usage.bytes <= 1000 * PAGE_BYTES + 2 * 50 * PAGE_BYTES  # two may commit at once
  # No double writes that cost space: what is held twice goes.
  store.compact()
  assert store.usage().bytes <= 1.1 * usage.pages * PAGE_BYTES + 8192 * len(
    os.listdir(tmp_path / "store" / "segments")
  )
  assert os.listdir(tmp_path / "store" / "trash") == []
  store.close()
