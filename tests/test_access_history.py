"""Tests of strata_jax.access_history."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strata_jax.access_history import AccessHistory


def test_unknown_pages_count_nothing():
  history = AccessHistory(2, 1024)
  assert history.lookup(history.page_hashes(7, 0, np.arange(6, dtype=np.int32))).tolist() == [0] * 3


def test_a_page_counts_as_often_as_any_page_after_it():
  history = AccessHistory(1, 1024)
  hashes = history.page_hashes(7, 0, np.arange(6, dtype=np.int32))
  history.record(hashes[3:4], 2)
  history.record(hashes[4:5], 1)
  assert history.lookup(hashes).tolist() == [2, 2, 2, 2, 1, 0]


def test_counts_stay_right_in_a_table_that_is_much_too_small():
  history = AccessHistory(1, 64)
  hashes = history.page_hashes(7, 0, np.arange(1000, dtype=np.int32))
  history.record(hashes, 3)
  counts = history.lookup(hashes)
  assert (counts[:900] == 3).all()  # what is overwritten is mended by what survives after it
  assert history.lookup(history.page_hashes(8, 0, np.arange(1000, dtype=np.int32))).max() == 0


def test_the_order_of_tokens_counts():
  history = AccessHistory(1, 1024)
  one, other = (
    history.page_hashes(7, 0, np.array(ids, np.int32)) for ids in ([1, 2, 3, 4], [2, 1, 3, 4])
  )
  assert not set(one.tolist()) & set(other.tolist())


def test_counts_end_at_255():
  history = AccessHistory(1, 64)
  hashes = history.page_hashes(7, 0, np.arange(2, dtype=np.int32))
  history.record(hashes, 300)
  assert history.lookup(hashes).tolist() == [255, 255]


def test_clear_forgets():
  history = AccessHistory(1, 64)
  hashes = history.page_hashes(7, 0, np.arange(4, dtype=np.int32))
  history.record(hashes, 3)
  history.clear()
  assert history.lookup(hashes).max() == 0


@given(
  st.lists(st.integers(-5, 2**31 - 1), min_size=1, max_size=60),
  st.integers(1, 4),
  st.integers(0, 2**64 - 1),
  st.data(),
)
def test_hashes_do_not_depend_on_where_a_path_is_cut(ids, page_size, root, data):
  tokens = np.array(ids, np.int32)[: len(ids) // page_size * page_size]
  whole = AccessHistory(page_size, 16).page_hashes(root, 0, tokens)
  assert len(whole) == len(tokens) // page_size
  cut = data.draw(st.integers(0, len(whole)))
  history = AccessHistory(page_size, 16)
  upper = history.page_hashes(root, 0, tokens[: cut * page_size])
  at = int(upper[-1]) if cut else root
  lower = history.page_hashes(at, cut * page_size, tokens[cut * page_size :])
  assert np.array_equal(np.concatenate([upper, lower]), whole)
