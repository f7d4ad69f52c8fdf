"""How much KV a decode step reads where rows that begin with the same pages read them once.

The rule of `pallas_kernels.attention_parts.work_line.find_groups`, on the host.
"""

from collections.abc import Sequence

import numpy as np

from strata_jax.pallas_kernels.attention_parts.sharing import (
  LEAST_SHARED_PART,
  LEAST_SHARED_TOKENS,
)


def read_tokens(
  tables: Sequence[np.ndarray], tokens: Sequence[int], *, width: int, page_size: int
) -> int:
  """Tokens whose KV one decode step reads.

  Rows are alike whose tables begin with the same whole pages of at least `LEAST_SHARED_TOKENS`
  tokens and of the `LEAST_SHARED_PART`th part of the longest context. Up to `width` of them, in
  their order, are a group: it reads what all of it have in common once, each row its own rest.

  Args:
    tables: of each row int32 [pages], device slots; at least the whole pages of its tokens.
    tokens: of each row, those that it attends to.
    width: most rows of a group; with 1 the sum of `tokens` is read.
    page_size: tokens of a page.
  """
  total = sum(tokens)
  if width == 1 or len(tokens) < 2:
    return total
  least_tokens = max(max(tokens) // LEAST_SHARED_PART, LEAST_SHARED_TOKENS)
  least_pages = -(-least_tokens // page_size)
  groups: dict[bytes, list[np.ndarray]] = {}  # by their first pages; not full yet
  for table, count in zip(tables, tokens, strict=True):
    pages = count // page_size
    if pages < least_pages:
      continue
    group = groups.setdefault(table[:least_pages].tobytes(), [])
    group.append(table[:pages])
    if len(group) == width:
      total -= _saved_pages(group, least_pages) * page_size
      group.clear()
  return total - sum([_saved_pages(group, least_pages) for group in groups.values()]) * page_size


def _saved_pages(group: list[np.ndarray], common: int) -> int:
  """Pages that the rows of a group do not read again; they have at least `common` in common."""
  if len(group) < 2:
    return 0
  leader = group[0]
  most = min([len(table) for table in group])
  for table in group[1:]:
    differs = leader[common:most] != table[common:most]
    if differs.any():
      most = common + int(differs.argmax())
  return (len(group) - 1) * most
