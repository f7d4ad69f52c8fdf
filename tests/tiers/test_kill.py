"""Case 35: processes die at any instant, others find only whole pages and no leftovers."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from strata_jax.tiers import page_store
from tests.tiers.kill_worker import UNIVERSE
from tests.tiers.store_pages import check_read, keys_of

PAGE_BYTES = 2000
SEGMENT_BYTES = 12 * PAGE_BYTES
OPTIONS = {
  "page_bytes": PAGE_BYTES,
  "fingerprint": "model",
  "capacity_bytes": 130 * PAGE_BYTES,
  "segment_bytes": SEGMENT_BYTES,
}


@pytest.fixture
def forker():
  process = subprocess.Popen(
    [sys.executable, "-m", "tests.tiers.kill_worker"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )  # fmt: skip
  yield process
  process.stdin.close()
  process.wait(timeout=30)
  process.stdout.close()


def kill_once(forker, url: str, seed: int, after_s: float) -> None:
  """Lets a child work for a while and kills it."""
  order = {"url": url, "seed": seed, "options": OPTIONS}
  forker.stdin.write(json.dumps(order) + "\n")
  forker.stdin.flush()
  pid = int(forker.stdout.readline())
  time.sleep(after_s)
  os.kill(pid, signal.SIGKILL)
  assert forker.stdout.readline().strip() == "gone"


def files_below(folder: pathlib.Path) -> dict[str, int]:
  return {
    str(path.relative_to(folder)): path.stat().st_size
    for path in folder.rglob("*")
    if path.is_file()
  }


def check_segments(folder: pathlib.Path, store) -> None:
  """Usage is right within one segment, and nothing is there that no reader finds."""
  files = files_below(folder)
  strangers = [name for name in files if not name.startswith(("segments/", "writers/"))]
  assert set(strangers) <= {"compaction", "strata-segments.json"}
  assert not [name for name in files if "orbax-checkpoint-tmp" in name]
  assert len([name for name in files if name.startswith("writers/")]) == 1
  on_disk = sum(size for name, size in files.items() if name.startswith("segments/"))
  assert abs(store.usage().bytes - on_disk) <= SEGMENT_BYTES
  assert on_disk <= OPTIONS["capacity_bytes"]


def check_values(folder: pathlib.Path, store) -> None:
  """All that is there are whole values that count."""
  sizes = list(files_below(folder).values())
  assert set(sizes) <= {PAGE_BYTES + 16}
  assert store.usage().bytes == sum(sizes)


def kill_many(forker, tmp_path, kind: str, rounds: int) -> None:
  folder = tmp_path / "store"
  url = str(folder) if kind == "segments" else f"file://{folder}/"
  keys = keys_of("kill", UNIVERSE)
  rng = random.Random(rounds)
  found = 0
  for seed in range(rounds):
    kill_once(forker, url, seed, after_s=rng.uniform(0.0, 0.25))
    store = page_store.open_store(url, **OPTIONS)
    right = check_read(store, keys)  # bit for bit, or a miss
    assert np.array_equal(right, store.contains(keys))
    found += np.count_nonzero(right)
    assert store.stats["bad_pages"] == 0  # whole pages only: none needed its checksum
    (check_segments if kind == "segments" else check_values)(folder, store)
    store.close()
  assert found > 10 * rounds  # there was something to lose


@pytest.mark.parametrize("kind", ["segments", "tensorstore"])
def test_a_few_kills(forker, tmp_path, kind):
  kill_many(forker, tmp_path, kind, rounds=5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rounds"), [("segments", 200), ("tensorstore", 50)])
def test_kills_at_random_instants(forker, tmp_path, kind, rounds):
  kill_many(forker, tmp_path, kind, rounds)
