"""Runs in a process of its own: forks children that use a store as hard as they can, to be killed.

Reads lines of JSON: the keyword arguments of `open_store`, the URL and a seed; forks; answers with
the child's process id once the child has written a first page. Forking from here, where everything
is imported and nothing has run yet, makes a child in milliseconds.
"""

import json
import os
import sys
import traceback
import warnings

import numpy as np
import orbax.checkpoint  # noqa: F401  imported before the fork
import tensorstore  # noqa: F401

from strata_jax.tiers import orbax_segments, page_store, tensorstore_pages  # noqa: F401
from tests.tiers.store_pages import check_read, keys_of, pages_of

UNIVERSE = 160  # pages that exist at all


def work(url: str, seed: int, options: dict) -> None:
  """Writes, reads, deletes and compacts until somebody kills this process."""
  store = page_store.open_store(url, **options)
  rng = np.random.default_rng(seed)
  keys = keys_of("kill", UNIVERSE)
  store.write(keys[:1], pages_of(keys[:1], store.page_bytes))
  store.delete(keys[:1])
  store.write(keys[:1], pages_of(keys[:1], store.page_bytes))
  store.flush()  # whatever happens once has happened
  print(os.getpid(), flush=True)
  while True:
    start, count = int(rng.integers(UNIVERSE)), int(rng.integers(1, 16))
    some = keys[start : start + count]
    store.write(some, pages_of(some, store.page_bytes))
    if rng.random() < 0.3:
      store.flush()
    if rng.random() < 0.2:
      store.delete([keys[i] for i in rng.integers(UNIVERSE, size=10)])
    if rng.random() < 0.2 and isinstance(store, orbax_segments.OrbaxSegments):
      store.compact()
    check_read(store, [keys[i] for i in rng.integers(UNIVERSE, size=10)])


def main() -> None:
  warnings.simplefilter("ignore")  # JAX warns of forks; no child uses what its parent began
  for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if not child:
      try:
        work(**order)
      except BaseException:  # a child that ends by itself says why
        traceback.print_exc()
      os._exit(1)
    os.waitpid(child, 0)
    print("gone", flush=True)


if __name__ == "__main__":
  main()
