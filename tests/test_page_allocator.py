"""Tests of strata_jax.page_allocator."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jax.page_allocator import PageAllocator


def test_hands_out_every_slot_once():
  pool = PageAllocator(5)
  slots = np.concatenate([pool.allocate(2), pool.allocate(3)])
  assert sorted(slots.tolist()) == [0, 1, 2, 3, 4]
  assert pool.free_pages == 0
  assert pool.used_pages == 5


def test_a_call_for_too_many_takes_none():
  pool = PageAllocator(3)
  pool.allocate(1)
  with pytest.raises(MemoryError, match="at most 2 free pages, got a call for 3"):
    pool.allocate(3)
  assert pool.free_pages == 2


def test_more_back_than_handed_out_is_an_error():
  pool = PageAllocator(3)
  slots = pool.allocate(1)
  pool.free(slots)
  with pytest.raises(ValueError, match="at most 0 slots in use, got 1 back"):
    pool.free(slots)


def test_negative_capacity_is_an_error():
  with pytest.raises(ValueError, match="got -1"):
    PageAllocator(-1)


def test_a_huge_pool_costs_nothing_until_it_is_used():
  pool = PageAllocator(2**31 - 1)
  assert pool.allocate(3).tolist() == [0, 1, 2]


@given(st.lists(st.integers(0, 7), max_size=40), st.randoms(use_true_random=False))
def test_slots_have_one_owner_at_a_time(sizes, random):
  pool = PageAllocator(16)
  owners: list[np.ndarray] = []
  for size in sizes:
    if size <= pool.free_pages:
      owners.append(pool.allocate(size))
    elif owners:
      pool.free(owners.pop(random.randrange(len(owners))))
    used = np.concatenate([*owners, np.empty(0, np.int32)]).astype(int)
    assert len(set(used.tolist())) == len(used)
    assert all(0 <= slot < 16 for slot in used)
    assert pool.free_pages == 16 - len(used)
    assert np.array_equal(np.flatnonzero(pool.used_mask()), np.sort(used))
