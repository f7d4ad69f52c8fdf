"""One of several processes over one folder: writes, reads and verifies until its time is over.

Arguments: the folder, a seed, seconds. Prints what it did as JSON; any wrong byte ends it with an
error.
"""

import json
import sys
import time

import numpy as np

from strata_jax.tiers.orbax_segments import OrbaxSegments
from tests.tiers.store_pages import check_read, keys_of, pages_of

PAGE_BYTES = 8192
UNIVERSE = 1500


def main(folder: str, seed: int, seconds: float) -> None:
  store = OrbaxSegments(
    folder,
    page_bytes=PAGE_BYTES,
    fingerprint="model",
    capacity_bytes=1000 * PAGE_BYTES,
    segment_bytes=50 * PAGE_BYTES,
    linger_s=0.1,
  )
  rng = np.random.default_rng(seed)
  keys = keys_of("shared", UNIVERSE)
  read = hits = 0
  end_s = time.monotonic() + seconds
  while time.monotonic() < end_s:
    start = int(rng.integers(UNIVERSE))
    some = keys[start : start + int(rng.integers(1, 40))]
    store.write(some, pages_of(some, PAGE_BYTES))
    start = int(rng.integers(UNIVERSE))
    right = check_read(store, keys[start : start + 20])
    read += len(right)
    hits += int(np.count_nonzero(right))
    if rng.random() < 0.02:
      store.delete(keys[start : start + 3])
  store.flush()
  check_read(store, keys)
  store.close()
  print(json.dumps({"read": read, "hits": hits} | store.stats))


if __name__ == "__main__":
  main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
