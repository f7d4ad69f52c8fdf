"""What every page store must do; a store's test module subclasses `PageStoreContract`."""

import threading

import numpy as np
import pytest

from strata_jax.tiers import page_store
from strata_jax.tiers.faulty_store import DAMAGES, damage
from tests.tiers.store_pages import check_read, keys_of, pages_of

PAGE_BYTES = 1000  # no multiple of a word


class Medium:
  """Opens stores over one medium, which outlives them if it `lasts`."""

  def __init__(self, url: str, *, kind: str, lasts: bool = True):
    self.url = url
    self.kind = kind  # memory, segments, values
    self.lasts = lasts
    self._opened: list[page_store.PageStore] = []

  def open(self, **changes) -> page_store.PageStore:
    wanted = {"page_bytes": PAGE_BYTES, "fingerprint": "model"} | changes
    store = page_store.open_store(self.url, **wanted)
    self._opened.append(store)
    return store

  def close(self) -> None:
    for store in self._opened:
      store.close()


def write(store, keys) -> int:
  future = store.write(keys, pages_of(keys, store.page_bytes))
  store.flush()
  return future.result(timeout=60)


class PageStoreContract:
  """Subclasses have a fixture `medium`, a fresh `Medium` that is closed afterwards."""

  effort = 10  # less for a slow medium

  @pytest.fixture
  def lasting(self, medium):
    """A medium that outlives a process."""
    if not medium.lasts:
      pytest.skip("gone with its process")
    return medium

  def test_what_was_written_is_read(self, medium):
    store = medium.open()
    keys = keys_of("a", 20)
    assert store.longest_prefix(keys) == 0
    assert write(store, keys) == 20
    assert store.longest_prefix(keys) == 20
    assert check_read(store, keys).all()
    assert check_read(store, keys[::-1]).all()
    assert store.usage().pages == 20
    assert store.usage().bytes >= 20 * PAGE_BYTES
    assert store.usage().pending_pages == 0

  def test_reads_and_writes_of_no_page(self, medium):
    store = medium.open()
    nothing = np.empty((0, PAGE_BYTES), np.uint8)
    assert store.write([], nothing).result(timeout=60) == 0
    assert store.read([], nothing).result(timeout=60).shape == (0,)
    assert store.longest_prefix([]) == 0
    assert store.delete([]) == 0

  def test_rows_name_the_slots_of_a_pool(self, medium):
    store = medium.open()
    keys = keys_of("a", 5)
    pool = np.zeros((12, PAGE_BYTES), np.uint8)
    rows = np.array([7, 2, 3, 11, 0], np.int32)
    pool[rows] = pages_of(keys, PAGE_BYTES)
    written = store.write(keys, pool, rows)
    pool[:] = 0xAA  # handed over: the pool may be used again
    store.flush()
    assert written.result(timeout=60) == 5
    back = np.array([1, 4, 5, 6, 9])
    assert store.read(keys, pool, back).result(timeout=60).all()
    np.testing.assert_array_equal(pool[back], pages_of(keys, PAGE_BYTES))
    others = np.setdiff1d(np.arange(12), back)
    assert (pool[others] == 0xAA).all()

  def test_a_present_page_is_not_written_again(self, medium):
    store = medium.open()
    keys = keys_of("a", 8)
    assert write(store, keys[:6]) == 6
    used_bytes = store.usage().bytes
    assert write(store, keys[:6]) == 0
    assert store.usage().bytes == used_bytes
    assert write(store, keys) == 2
    assert write(store, [keys[0], keys[0]]) == 0
    new = keys_of("b", 1)
    assert write(store, [new[0], new[0]]) == 1

  def test_a_hole_ends_the_prefix(self, medium):
    """Case 40: of three pages the second is gone, the hit is one page."""
    store = medium.open()
    keys = keys_of("a", 3)
    write(store, keys)
    assert store.delete(keys[1:2]) == 1
    assert store.delete(keys[1:2]) == 0
    assert store.longest_prefix(keys) == 1
    assert store.contains(keys).tolist() == [True, False, True]
    assert check_read(store, keys).tolist() == [True, False, True]
    assert write(store, keys) == 1
    assert store.longest_prefix(keys) == 3

  def test_a_page_can_be_deleted_before_it_is_durable(self, medium):
    store = medium.open()
    keys = keys_of("a", 3)
    store.write(keys, pages_of(keys, PAGE_BYTES))
    store.delete(keys[1:2])
    store.flush()
    assert store.contains(keys).tolist() == [True, False, True]
    assert check_read(store, keys).tolist() == [True, False, True]

  @pytest.mark.parametrize("kind", DAMAGES)
  def test_a_damaged_page_is_a_miss_with_a_reason(self, medium, kind, caplog):
    """Case 34: truncated, bit-flipped, empty and swapped pages."""
    store = medium.open()
    keys = keys_of("a", 12)
    write(store, keys)
    assert damage(store, keys[7], kind, seed=3)
    right = check_read(store, keys)
    assert not right[7]
    assert right[:7].all() or (kind == "empty" and medium.kind == "segments")
    assert store.stats["bad_pages"] >= 1
    if medium.kind != "memory":
      assert "miss" in caplog.text
    assert store.longest_prefix(keys) <= 7
    assert write(store, keys) >= 1  # and it can be written again
    assert store.longest_prefix(keys) == 12
    assert check_read(store, keys).all()

  @pytest.mark.parametrize("seed", range(3))
  def test_every_single_bit_counts(self, medium, seed):
    store = medium.open()
    keys = keys_of("a", 4 * self.effort)
    write(store, keys)
    for i, key in enumerate(keys):
      assert damage(store, key, "flip", seed=seed * 100 + i)
    assert not check_read(store, keys).any()

  def test_pages_outlive_the_store(self, lasting):
    keys = keys_of("a", 30)
    first = lasting.open()
    write(first, keys)
    usage = first.usage()
    first.close()
    second = lasting.open()
    assert second.longest_prefix(keys) == 30
    assert check_read(second, keys).all()
    assert second.usage().pages == usage.pages
    assert second.usage().bytes == usage.bytes

  @pytest.mark.parametrize("changes", [{"fingerprint": "other"}, {"page_bytes": PAGE_BYTES + 8}])
  def test_another_model_or_layout_never_hits(self, lasting, changes):
    """Case 33; the keys differ too, but even equal keys must not hit."""
    keys = keys_of("a", 10)
    write(lasting.open(), keys)
    other = lasting.open(**changes)
    assert other.longest_prefix(keys) == 0
    assert not check_read(other, keys).any()
    write(other, keys)
    assert check_read(other, keys).all()
    assert check_read(lasting.open(), keys).all()

  def test_two_stores_over_one_medium_find_each_others_pages(self, lasting):
    one, two = lasting.open(), lasting.open()
    keys = keys_of("a", 10)
    write(one, keys[:6])
    assert two.longest_prefix(keys) == 6
    assert write(two, keys) == 4
    assert one.longest_prefix(keys) == 10
    assert check_read(one, keys).all()
    assert check_read(two, keys).all()
    one.delete(keys[:3])
    assert not check_read(one, keys[:3]).any()

  def test_capacity_bounds_usage_and_the_least_recently_used_goes(self, medium):
    capacity = 20 * self.effort * PAGE_BYTES
    store = medium.open(capacity_bytes=capacity)
    keys = keys_of("a", 40 * self.effort)
    kept = keys[:10]
    write(store, kept)
    for start in range(10, len(keys), 10):
      write(store, keys[start : start + 10])
      assert store.usage().bytes <= capacity
      assert check_read(store, kept).all()  # used all the time
    present = store.contains(keys)
    assert present[:10].all()
    assert present[-10:].all()
    assert not present[10 : 10 * self.effort].any()
    assert 10 * self.effort <= np.count_nonzero(present) <= 20 * self.effort

  def test_a_capacity_without_room_is_refused(self, medium):
    with pytest.raises(ValueError, match="expected"):
      medium.open(capacity_bytes=10)

  def test_arrays_of_another_shape_are_refused(self, medium):
    store = medium.open()
    keys = keys_of("a", 2)
    for wrong in (
      np.zeros((2, PAGE_BYTES - 1), np.uint8),
      np.zeros((2, PAGE_BYTES), np.int8),
      np.zeros((2, 2 * PAGE_BYTES), np.uint8)[:, ::2],
    ):
      with pytest.raises(ValueError, match="expected"):
        store.write(keys, wrong)
      with pytest.raises(ValueError, match="expected"):
        store.read(keys, wrong)
    with pytest.raises(ValueError, match="one row a key"):
      store.read(keys, np.zeros((4, PAGE_BYTES), np.uint8), np.arange(3))

  def test_many_threads_read_and_write_one_store(self, medium):
    store = medium.open(capacity_bytes=2000 * PAGE_BYTES)
    keys = keys_of("a", 200)
    errors = []

    def work(seed: int) -> None:
      rng = np.random.default_rng(seed)
      try:
        for _ in range(self.effort):
          some = [keys[i] for i in rng.choice(200, 20, replace=False)]
          written = store.write(some, pages_of(some, PAGE_BYTES))
          if medium.kind == "values":  # found once durable
            written.result(timeout=60)
          assert check_read(store, some).all()
      except Exception as error:
        errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    assert not errors
    store.flush()
    assert check_read(store, [key for key in keys if store.contains([key])[0]]).all()

  def test_closing_twice_is_nothing(self, medium):
    store = medium.open()
    write(store, keys_of("a", 2))
    store.close()
    store.close()
