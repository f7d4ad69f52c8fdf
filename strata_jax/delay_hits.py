"""What hits cost when a block needs time to be computed: an infinite cache without a queue.

A request that arrives at t hits the leading blocks of its prompt that are ready at t. All the other
blocks of its prompt it computes itself, at once; they are ready at t + resolve time, which is
proportional to the tokens computed. A block that others are computing is no hit (it is a delay
hit), so that the hit rate falls as resolve times and arrival rates grow. After Strata's figure
on simulated delay hits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from strata_jax.workloads.workload import Workload


class DelayHits(NamedTuple):
  """What a run of requests would hit; all three count prompt tokens."""

  input_tokens: int
  hit_tokens: int
  delay_hit_tokens: int  # known but not ready yet: computed once more

  @property
  def hit_rate(self) -> float:
    return self.hit_tokens / self.input_tokens


def block_ids(workload: Workload, block_tokens: int) -> tuple[list[np.ndarray], int]:
  """The whole blocks of each prompt as ids, int64 [blocks], and how many distinct ids there are.

  An id names a block together with everything before it, in one namespace.
  """
  table: dict[tuple[int, bytes], int] = {}
  result: list[np.ndarray] = []
  for request in workload.requests:
    parent = -1 - hash_namespace(table, request.salt, request.adapter)
    tokens = request.prompt_ids
    ids = np.empty(len(tokens) // block_tokens, dtype=np.int64)
    for index in range(len(ids)):
      key = (parent, tokens[index * block_tokens : (index + 1) * block_tokens].tobytes())
      parent = table.setdefault(key, len(table))
      ids[index] = parent
    result.append(ids)
  return result, len(table)


def hash_namespace(table: dict[tuple[int, bytes], int], salt: str, adapter: str) -> int:
  """A number for the namespace, 0 for the plain one; numbered in the same table."""
  if not salt and not adapter:
    return 0
  return 1 + table.setdefault((-1, f"{salt}\0{adapter}".encode()), len(table))


def simulate(
  blocks: Sequence[np.ndarray],
  distinct: int,
  prompt_tokens: Sequence[int],
  arrivals_s: Sequence[float],
  *,
  block_tokens: int,
  resolve_s_per_token: float,
) -> DelayHits:
  """Runs requests through the infinite cache in order of arrival.

  At least one token of a prompt is computed, so that a prompt of whole blocks hits at most all but
  its last block. Times must not fall.
  """
  ready_s = np.full(distinct, np.inf)
  known = np.zeros(distinct, dtype=bool)
  hit_tokens = delay_tokens = 0
  for ids, tokens, at_s in zip(blocks, prompt_tokens, arrivals_s, strict=True):
    usable = ids[: (tokens - 1) // block_tokens]
    hits = _leading(ready_s[usable] <= at_s)
    delayed = _leading(known[usable]) - hits
    hit_tokens += hits * block_tokens
    delay_tokens += delayed * block_tokens
    done_s = at_s + resolve_s_per_token * (tokens - hits * block_tokens)
    computed = ids[hits:]
    ready_s[computed] = np.minimum(ready_s[computed], done_s)
    known[computed] = True
  return DelayHits(sum(prompt_tokens), hit_tokens, delay_tokens)


def _leading(flags: np.ndarray) -> int:
  """How many of the first flags are true before one is not."""
  return len(flags) if flags.all() else int(flags.argmin())
