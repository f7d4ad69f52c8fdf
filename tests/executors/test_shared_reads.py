import itertools
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.executors import shared_reads
from strata_jax.pallas_kernels.attention_parts import tiles, work_line


@st.composite
def prefix_trees(draw):
  """Tables of rows that go the way of an earlier row for some pages, as of a radix tree."""
  page_size = draw(st.sampled_from([8, 16, 32]))
  most = 640 // page_size
  tables, tokens, pages = [], [], itertools.count()
  for row in range(draw(st.integers(1, 9))):
    table = [next(pages) for _ in range(most)]
    tokens.append(draw(st.integers(0, most * page_size)))
    if row and draw(st.booleans()):
      source = draw(st.integers(0, row - 1))
      common = draw(st.integers(0, min(tokens[row], tokens[source]) // page_size))
      table[:common] = tables[source][:common]
    tables.append(table)
  return np.array(tables, np.int32), np.array(tokens, np.int32), page_size


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(batch=prefix_trees(), width=st.integers(2, 4))
def test_it_is_what_the_groups_of_the_kernel_read(batch, width):
  tables, tokens, page_size = batch
  tile = tiles.find_tile(8, page_size, 8 * page_size)
  assert tile is not None
  assert tile.tokens == page_size
  groups = work_line.find_groups(jnp.asarray(tables), jnp.asarray(tokens), width=width, tile=tile)
  _, sides, shared = (np.asarray(array) for array in groups)
  alone = int((tokens - shared).sum())
  together = int(shared[sides == 0].sum())
  rows = [table[: -(-count // page_size)] for table, count in zip(tables, tokens, strict=True)]
  got = shared_reads.read_tokens(rows, tokens.tolist(), width=width, page_size=page_size)
  assert got == alone + together
  one = shared_reads.read_tokens(rows, tokens.tolist(), width=1, page_size=page_size)
  assert one == tokens.sum()


def rows(*parts):
  """Tables that begin with so many pages of the first, then go on alone."""
  first = np.arange(1000, dtype=np.int32)
  return [
    np.concatenate([first[:common], 1000 * (row + 1) + np.arange(pages - common, dtype=np.int32)])
    for row, (common, pages) in enumerate(parts)
  ]


@pytest.mark.parametrize(
  ("parts", "width", "read_pages"),
  [
    ([(90, 100), (90, 100)], 2, 110),
    ([(90, 100), (90, 100)], 1, 200),
    ([(90, 100), (60, 100), (90, 100)], 3, 3 * 40 + 60),  # what all of a group have
    ([(90, 100), (60, 100), (90, 100)], 2, 200 - 60 + 100),  # the third has no partner
    ([(90, 100)] * 4, 2, 2 * 110),
    ([(90, 100), (15, 15), (90, 100)], 2, 110 + 15),  # too short to be alike
    ([(24, 100), (24, 100)], 2, 200),  # under a quarter
    ([(25, 100), (25, 100)], 2, 175),
    ([(15, 20), (15, 20)], 2, 40),  # 240 tokens are too few
    ([(16, 20), (16, 20)], 2, 24),
    ([(50, 50), (50, 90)], 2, 90),
  ],
)
def test_groups_read_what_all_of_them_have_once(parts, width, read_pages):
  tables = rows(*parts)
  tokens = [16 * len(table) for table in tables]
  got = shared_reads.read_tokens(tables, tokens, width=width, page_size=16)
  assert got == 16 * read_pages


def test_only_whole_pages_of_both_are_shared():
  tables = [np.arange(100, dtype=np.int32)] * 2  # with room for tokens that come yet
  for tokens, shared in (((1600, 1600), 1600), ((1599, 1600), 1584), ((1590, 1000), 992)):
    got = shared_reads.read_tokens(tables, tokens, width=2, page_size=16)
    assert got == sum(tokens) - shared


def test_one_page_in_common_behind_others_is_no_common_beginning():
  """A row may keep pages of its own for tokens that the tree has, and go on with the tree's."""
  one, two = np.arange(100, dtype=np.int32), np.arange(100, dtype=np.int32)
  two[:10] += 1000
  assert shared_reads.read_tokens([one, two], [1600, 1600], width=2, page_size=16) == 3200


def test_it_needs_no_jax():
  code = "import sys, strata_jax.executors.shared_reads; assert 'jax' not in sys.modules"
  subprocess.run([sys.executable, "-c", code], check=True)
