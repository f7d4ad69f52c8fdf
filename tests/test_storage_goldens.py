"""A real model through device, host, storage, a new process and back: exact outputs."""

import json
import os
import subprocess
import sys

import pytest

from tests.shared_data import shared_data
from tests.storage_server import StorageServer, golden_requests, outputs_of


def in_a_new_process(page_size: int, urls: list[str]) -> list[dict]:
  done = subprocess.run(
    [sys.executable, "-m", "tests.storage_server", str(page_size), *urls],
    capture_output=True, text=True, timeout=600, check=False,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_goldens_from_every_store(page_size, tmp_path):
  goldens = json.loads(shared_data("stories260K/golden.json").read_text())
  expected = [golden["greedy_ids"] for golden in goldens]
  whole = [(len(golden["prompt_ids"]) - 1) // page_size * page_size for golden in goldens]
  server = StorageServer(str(shared_data("stories260K")), page_size)
  urls = [str(tmp_path / "segments"), f"file://{tmp_path}/values/"]
  for url in urls:
    store = server.open_store(url)
    result, stats = server.serve(golden_requests(goldens), store)
    store.close()
    assert outputs_of(result) == expected
    assert stats.durable_pages > sum(whole) // page_size // 2
    assert stats.failed_spills == 0
  for answer in in_a_new_process(page_size, urls):
    assert answer["outputs"] == expected
    assert answer["hit_tokens"] == whole
    assert sum(answer["storage_hit_tokens"]) >= sum(whole) / 3

  memory = server.open_store("memory://")
  for _ in range(2):  # a memory store goes with its process: only the pools are new
    result, stats = server.serve(golden_requests(goldens), memory)
    assert outputs_of(result) == expected
  assert stats.prefetched_tokens >= sum(whole) / 3
