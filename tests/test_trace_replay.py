"""Tests of strata_jax.trace_replay: exact numbers of a public trace."""

import json

import numpy as np
import pytest

from strata_jax.trace_replay import PrefixCache
from strata_jax.tree_checks import check_slots, check_tree
from tests.shared_data import shared_data

HIT_PAGES = {1_000: 12_990, 5_000: 34_193, 20_000: 84_692, 100_000: 104_926}


def prompts(limit: int | None = None):
  block = np.arange(512, dtype=np.int32)
  with open(shared_data("mooncake/conversation_trace.jsonl"), encoding="utf-8") as lines:
    for number, line in enumerate(lines):
      if number == limit:
        return
      row = json.loads(line)
      ids = np.asarray(row["hash_ids"], np.int32)[:, None] * 512 + block
      yield ids.reshape(-1)[: row["input_length"]]


def replay(page_size: int, capacity_pages: int | None = None, limit: int | None = None):
  cache = PrefixCache(page_size, capacity_pages)
  for prompt in prompts(limit):
    cache.admit(prompt)
  return cache


@pytest.mark.parametrize(
  ("page_size", "reusable"), [(1, 2_962_765), (16, 2_962_688), (64, 2_962_304), (512, 2_959_360)]
)
def test_first_thousand_requests(page_size, reusable):
  cache = replay(page_size, limit=1000)
  assert cache.input_tokens == 13_732_944
  assert cache.hit_tokens == reusable
  check_tree(cache.tree)


@pytest.mark.slow
@pytest.mark.parametrize("capacity_pages", HIT_PAGES)
def test_the_whole_trace_with_a_limit(capacity_pages):
  cache = replay(512, capacity_pages)
  assert cache.hit_tokens == 512 * HIT_PAGES[capacity_pages]
  check_tree(cache.tree)
  check_slots(cache.tree, 0, cache.allocator)


def test_at_least_one_token_is_computed():
  cache = PrefixCache(16)
  prompt = np.arange(48, dtype=np.int32)
  assert [cache.admit(prompt) for _ in range(3)] == [0, 32, 32]
  assert cache.admit(np.arange(64, dtype=np.int32)) == 48


def test_a_prompt_larger_than_the_pool_keeps_its_beginning():
  cache = PrefixCache(4, 3)
  assert cache.admit(np.arange(100, dtype=np.int32)) == 0
  assert cache.admit(np.arange(100, dtype=np.int32)) == 12
  check_slots(cache.tree, 0, cache.allocator)


def test_a_prompt_shorter_than_a_page_is_never_reused():
  cache = PrefixCache(4, 3)
  assert [cache.admit(np.arange(3, dtype=np.int32)) for _ in range(2)] == [0, 0]
  assert not cache.tree.nodes


def test_namespaces_share_nothing():
  cache = PrefixCache(1)
  prompt = np.arange(10, dtype=np.int32)
  assert cache.admit(prompt, salt="a") == 0
  assert cache.admit(prompt, salt="b") == 0
  assert cache.admit(prompt) == 0
  assert cache.admit(prompt, adapter="a") == 0
  assert cache.admit(prompt, salt="a") == 9
