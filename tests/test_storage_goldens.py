"""A real model through device, host, storage, a new process and back: exact outputs."""

import json
import os
import subprocess
import sys

import pytest

from strata_jax.models.errors import WeightsError
from strata_jax.models.loader import smollm2_path
from tests.shared_data import shared_data
from tests.storage_server import StorageServer, golden_requests, outputs_of


def in_a_new_process(**job) -> list[dict]:
  done = subprocess.run(
    [sys.executable, "-m", "tests.storage_server"], input=json.dumps(job),
    capture_output=True, text=True, timeout=900, check=False,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def whole_pages(goldens: list[dict], page_size: int) -> list[int]:
  """Tokens of each prompt that can be hit."""
  return [(len(golden["prompt_ids"]) - 1) // page_size * page_size for golden in goldens]


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 64])
def test_goldens_from_every_store(page_size, tmp_path):
  goldens = json.loads(shared_data("stories260K/golden.json").read_text())
  expected = [golden["greedy_ids"] for golden in goldens]
  whole = whole_pages(goldens, page_size)
  weights = str(shared_data("stories260K"))
  server = StorageServer(weights, page_size)
  urls = [str(tmp_path / "segments"), f"file://{tmp_path}/values/"]
  for url in urls:
    store = server.open_store(url)
    result, stats = server.serve(golden_requests(goldens), store)
    store.close()
    assert outputs_of(result) == expected
    assert stats.durable_pages > sum(whole) // page_size // 2
    assert stats.failed_spills == 0
  for answer in in_a_new_process(weights=weights, page_size=page_size, urls=urls, goldens=goldens):
    assert answer["outputs"] == expected
    assert answer["hit_tokens"] == whole
    assert sum(answer["storage_hit_tokens"]) >= sum(whole) / 3

  memory = server.open_store("memory://")
  for _ in range(2):  # a memory store goes with its process: only the pools are new
    result, stats = server.serve(golden_requests(goldens), memory)
    assert outputs_of(result) == expected
  assert stats.prefetched_tokens >= sum(whole) / 3


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16])
def test_smollm2_goes_on_in_a_new_process(page_size, tmp_path):
  """Prompts and outputs are stored; another process continues each text in the middle.

  No golden text is as long as a page of 64 tokens: there is nothing to store then.
  """
  pytest.importorskip("gguf")
  try:
    smollm2_path()
  except WeightsError as error:
    pytest.skip(str(error))
  goldens = json.loads(shared_data("smollm2/golden_short.json").read_text())
  server = StorageServer("smollm2", page_size)
  urls = [str(tmp_path / "segments"), f"file://{tmp_path}/values/"]
  for url in urls:
    store = server.open_store(url)
    result, stats = server.serve(golden_requests(goldens), store)
    store.close()
    assert outputs_of(result) == [golden["greedy_ids"] for golden in goldens]
    assert stats.durable_pages >= len(goldens)
  later = [
    {"prompt_ids": g["prompt_ids"] + g["greedy_ids"][:16], "greedy_ids": g["greedy_ids"][16:]}
    for g in goldens
  ]
  answers = in_a_new_process(weights="smollm2", page_size=page_size, urls=urls, goldens=later)
  for answer in answers:
    assert answer["outputs"] == [golden["greedy_ids"] for golden in later]
    assert answer["storage_hit_tokens"] == whole_pages(later, page_size)
    assert sum(answer["storage_hit_tokens"]) >= 16 * len(goldens)
