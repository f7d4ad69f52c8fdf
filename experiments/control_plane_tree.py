"""How long matching and inserting take: the part of `experiments.control_plane` for the tree."""

import statistics
import time
from collections.abc import Callable

import numpy as np

from strata_jax.radix_tree import HiRadixTree


def measure(
  *, tokens: int = 131_072, page_size: int = 1, nodes: tuple[int, ...] = (1, 64), repeats: int = 60
) -> dict[str, float]:
  """Times of the tree over the time of `numpy.array_equal` of two int32 arrays of `tokens`.

  match: a prompt that is wholly cached on a path of so many nodes. insert: wholly new tokens, put
  in as that path, each node below the one before, as the chunks of a prompt are. Both are timed in
  turn with array_equal; the ratio is that of the medians.

  Returns:
    `match_ratio_<nodes>`, `insert_ratio_<nodes>`, and `array_equal_us`.
  """
  prompt = np.arange(tokens, dtype=np.int32)
  prompt.flags.writeable = False  # the tree need not copy it
  twin = prompt.copy()
  slots = np.arange(tokens // page_size, dtype=np.int32)
  found: dict[str, float] = {}
  plain: list[float] = []
  for count in nodes:
    matches, inserts = [], []
    for _ in range(repeats):
      plain.append(_seconds(lambda: np.array_equal(prompt, twin)))
      tree = HiRadixTree(page_size)
      inserts.append(_seconds(lambda t=tree, n=count: _insert(t, prompt, slots, n)))
      match = tree.match(prompt)
      if match.tokens != tokens or len(match.nodes) != count:
        raise AssertionError(f"expected {tokens} tokens on {count} nodes, got {match}")
      matches.append(_seconds(lambda tree=tree: tree.match(prompt)))
    found[f"match_ratio_{count}"] = statistics.median(matches)
    found[f"insert_ratio_{count}"] = statistics.median(inserts)
  equal_s = statistics.median(plain)
  return {name: value / equal_s for name, value in found.items()} | {
    "array_equal_us": 1e6 * equal_s
  }


def _insert(tree: HiRadixTree, prompt: np.ndarray, slots: np.ndarray, count: int) -> None:
  below = None
  step = len(prompt) // count
  pages = step // tree.page_size
  for index in range(count):
    part = prompt[index * step : (index + 1) * step]
    inserted = tree.insert(part, slots[index * pages : (index + 1) * pages], below=below)
    below = inserted.nodes[-1]


def _seconds(call: Callable[[], object]) -> float:
  began_s = time.perf_counter()
  call()
  return time.perf_counter() - began_s
