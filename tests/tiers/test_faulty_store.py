"""Faults come by seed and as asked for."""

import time

import numpy as np
import pytest

from strata_jax.tiers.faulty_store import Faults, FaultyStore
from strata_jax.tiers.memory_store import MemoryStore
from tests.tiers.store_pages import check_read, keys_of, pages_of

PAGE_BYTES = 128


def make(**faults) -> FaultyStore:
  return FaultyStore(MemoryStore(page_bytes=PAGE_BYTES), Faults(**faults))


def write(store, keys) -> int:
  return store.write(keys, pages_of(keys, PAGE_BYTES)).result(timeout=60)


def test_without_faults_nothing_changes():
  store = make()
  keys = keys_of("a", 10)
  assert write(store, keys) == 10
  assert check_read(store, keys).all()
  assert store.longest_prefix(keys) == 10
  assert store.delete(keys[:1]) == 1
  assert store.usage().pages == 9
  store.flush()
  store.close()


def test_every_operation_is_delayed():
  store = make(delay_s=0.05)
  keys = keys_of("a", 1)
  for operation in (
    lambda: write(store, keys),
    lambda: check_read(store, keys),
    lambda: store.longest_prefix(keys),
    lambda: store.contains(keys),
    lambda: store.delete(keys),
  ):
    began_s = time.monotonic()
    operation()
    assert 0.05 <= time.monotonic() - began_s < 5


def test_a_delayed_read_does_not_hold_its_caller():
  store = make(delay_s=0.2)
  began_s = time.monotonic()
  future = store.read(keys_of("a", 1), np.empty((1, PAGE_BYTES), np.uint8))
  assert time.monotonic() - began_s < 0.1
  assert not future.result(timeout=60).any()


@pytest.mark.parametrize("fault", ["flip", "truncate"])
def test_damage_is_found_and_comes_by_seed(fault):
  keys = keys_of("a", 100)

  def lost(seed: int) -> list[bool]:
    store = make(seed=seed, **{fault: 0.2})
    write(store, keys)
    return check_read(store, keys).tolist()

  assert lost(1) == lost(1)
  assert lost(1) != lost(2)
  assert 60 <= sum(lost(1)) <= 95


def test_failures():
  store = make(fail=0.5, seed=1)
  keys = keys_of("a", 40)
  failed = 0
  for key in keys:
    future = store.write([key], pages_of([key], PAGE_BYTES))
    failed += isinstance(future.exception(timeout=60), OSError)
  assert 8 <= failed <= 32
  found = sum(bool(check_read(store, [key])[0]) for key in keys)
  assert found < 40 - failed
  assert sum(store.longest_prefix([key]) for key in keys) < 40 - failed
  assert sum(store.contains([key])[0] for key in keys) < 40 - failed


def test_a_full_medium():
  store = make(full_after_bytes=5 * PAGE_BYTES)
  keys = keys_of("a", 6)
  assert write(store, keys[:5]) == 5
  with pytest.raises(OSError, match="No space left"):
    write(store, keys[5:])
  assert check_read(store, keys[:5]).all()


def test_a_read_only_medium():
  store = make(read_only=True)
  with pytest.raises(OSError, match="Read-only"):
    write(store, keys_of("a", 1))


@pytest.mark.parametrize(
  "wrong", [{"delay_s": -1.0}, {"flip": -0.1}, {"fail": "often"}, {"full_after_bytes": -1}]
)
def test_impossible_faults_are_refused(wrong):
  with pytest.raises(ValueError, match="expected"):
    Faults(**wrong)
