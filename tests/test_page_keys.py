"""Tests of strata_jax.page_keys."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strata_jax.page_keys import child_key, iter_page_keys, page_keys, root_key


def test_a_key_depends_on_all_tokens_before_it():
  root = root_key("model")
  keys = page_keys(root, np.array([1, 2, 3, 4, 1, 2, 3, 4], np.int32), 4)
  assert len(keys) == 2
  assert keys[0] != keys[1]
  assert keys[1] == child_key(keys[0], np.array([1, 2, 3, 4], np.int32))


def test_namespaces_share_no_key():
  names = ("", "x", "y")
  roots = {root_key(*parts) for parts in itertools.product(names, names, names)}
  assert len(roots) == 27
  assert root_key("ab", "c") != root_key("a", "bc")


def test_keys_are_the_same_everywhere():
  # Other processes and machines must find them again: neither hash seeds nor byte order matter.
  tokens = np.array([1, 2, 70000, -1], ">i4")
  keys = page_keys(root_key("m", "s", "a"), tokens, 2)
  assert keys == page_keys(root_key("m", "s", "a"), tokens.astype(np.int64), 2)
  assert [key.hex()[:16] for key in keys] == ["dfcc49a861dfbf2a", "5a2b3a7402506d83"]


@given(
  st.lists(st.integers(0, 9), max_size=40),
  st.integers(1, 5),
  st.integers(0, 8),
)
def test_chaining_goes_on_from_any_page(ids, page_size, pages):
  tokens = np.array(ids, np.int32)
  root = root_key("m")
  keys = page_keys(root, tokens, page_size)
  assert len(keys) == len(ids) // page_size
  assert len(set(keys)) == len(keys)
  pages = min(pages, len(keys))
  parent = keys[pages - 1] if pages else root
  assert page_keys(parent, tokens[pages * page_size :], page_size) == keys[pages:]


def test_keys_are_made_as_they_are_asked_for():
  tokens = np.arange(10**6, dtype=np.int32)
  first = next(iter_page_keys(root_key("m"), tokens, 1))
  assert first == child_key(root_key("m"), tokens[:1])
