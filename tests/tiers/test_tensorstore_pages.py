"""One key a page: the format, faults of the medium, several processes."""

import contextlib
import fcntl
import json
import logging
import threading
import time

import numpy as np
import pytest
import tensorstore as ts

from strata_jax.tiers import page_checksum
from strata_jax.tiers.tensorstore_pages import TRAILER_BYTES, TensorStorePages, fault_of
from tests.tiers.store_pages import check_read, keys_of, page_of, pages_of

PAGE_BYTES = 640


@pytest.fixture
def make(tmp_path):
  stores = []

  def open_store(**changes) -> TensorStorePages:
    wanted = {"page_bytes": PAGE_BYTES, "fingerprint": "model"} | changes
    stores.append(TensorStorePages(f"file://{tmp_path}/", **wanted))
    return stores[-1]

  yield open_store
  for store in stores:
    store.close()


def write(store, keys) -> int:
  return store.write(keys, pages_of(keys, store.page_bytes)).result(timeout=60)


def test_a_value_is_the_page_and_a_trailer(make, tmp_path):
  store = make()
  (key,) = keys_of("a", 1)
  write(store, [key])
  data = (tmp_path / store.name(key)).read_bytes()
  page = page_of(key, PAGE_BYTES)
  assert data[:PAGE_BYTES] == page.tobytes()
  assert len(data) == PAGE_BYTES + TRAILER_BYTES
  assert data[PAGE_BYTES : PAGE_BYTES + 8] == b"STRPAGE1"
  checksum = int(page_checksum.checksums(page[None])[0]) ^ int.from_bytes(key[:8], "little")
  assert data[-8:] == checksum.to_bytes(8, "little")
  assert fault_of(key, data) == ""


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    (lambda value: value[:-1] + b"\x00", "checksum"),
    (lambda value: value[:-9], "trailer"),
    (lambda value: value[:10], "only 10 bytes"),
    (lambda value: b"", "only 0 bytes"),
  ],
)
def test_faults_have_names(make, tmp_path, change, reason):
  store = make()
  (key,) = keys_of("a", 1)
  write(store, [key])
  assert reason in fault_of(key, change((tmp_path / store.name(key)).read_bytes()))


def test_a_page_under_another_key_is_a_miss(make, tmp_path, caplog):
  store = make()
  one, two = keys_of("a", 2)
  write(store, [one, two])
  (tmp_path / store.name(two)).write_bytes((tmp_path / store.name(one)).read_bytes())
  assert check_read(store, [one, two]).tolist() == [True, False]
  assert "fails its checksum" in caplog.text


def test_what_is_listed_is_what_is_there(make, tmp_path):
  store = make()
  keys = keys_of("a", 30)
  write(store, keys)
  write(make(fingerprint="other"), keys_of("b", 5))
  (tmp_path / "stranger").touch()
  assert sorted(store.list_keys()) == sorted(keys)
  assert store.usage().pages == 30


def test_listed_pages_are_the_first_to_be_evicted(make):
  keys = keys_of("a", 30)
  write(make(), keys[:10])
  store = make(capacity_bytes=20 * (PAGE_BYTES + TRAILER_BYTES))
  assert store.usage().pages == 10
  write(store, keys[10:])
  present = store.contains(keys)
  assert not present[:10].any()
  assert present[10:].all()
  assert store.usage().pages == 20


def test_a_page_evicted_elsewhere_is_a_miss_and_counts_no_more(make):
  keys = keys_of("a", 4)
  one = make(capacity_bytes=100 * PAGE_BYTES)
  write(one, keys)
  make().delete(keys[:2])
  assert check_read(one, keys).tolist() == [False, False, True, True]
  assert write(one, keys) == 2


def test_a_failing_medium_warns_once(make, caplog):
  store = make()

  class Broken:
    def read(self, *_, **__):
      return self

    def result(self, timeout):
      raise ValueError("UNAVAILABLE: the network is down")

  kv_store, store.kv_store = store.kv_store, Broken()
  with caplog.at_level(logging.DEBUG):
    assert store.longest_prefix(keys_of("a", 3)) == 0
    assert not check_read(store, keys_of("a", 3)).any()
  assert store.stats["failed_reads"] == 6
  assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1
  store.kv_store = kv_store


class Silent:
  """A medium that takes everything and never answers."""

  def __init__(self):
    self.promises = []

  def read(self, *_, **__) -> ts.Future:
    promise, future = ts.Promise.new()
    self.promises.append(promise)
    return future

  write = read


def test_a_medium_that_never_answers_is_given_up_once_not_page_by_page(make, caplog):
  store = make(timeout_s=0.2)
  keys = keys_of("a", 60)
  kv_store, store.kv_store = store.kv_store, Silent()
  began_s = time.monotonic()
  assert store.longest_prefix(keys) == 0
  assert not check_read(store, keys).any()
  assert store.delete(keys) == 0
  future = store.write(keys, pages_of(keys, PAGE_BYTES))
  same = store.write(keys[:1], pages_of(keys[:1], PAGE_BYTES))
  store.flush()
  for one in (future, same):
    with pytest.raises(OSError, match=r"no answer within 0\.2 s"):
      one.result(timeout=60)
  assert time.monotonic() - began_s < 5
  assert "a page cannot be read: store: no answer within 0.2 s" in caplog.text
  assert store.stats["failed_writes"] >= 60
  store.kv_store = kv_store
  assert write(store, keys) == 60
  assert check_read(store, keys).all()


def test_a_write_does_not_wait_for_ever_for_those_before_it(make):
  store = make(timeout_s=0.2)
  one, two = keys_of("a", 2)
  kv_store, store.kv_store = store.kv_store, Silent()
  store._slots = threading.BoundedSemaphore(1)
  began_s = time.monotonic()
  with pytest.raises(OSError, match="no answer"):
    store.write([one, two], pages_of([one, two], PAGE_BYTES))
  assert store.stats["failed_writes"] == 1
  store.flush()
  assert time.monotonic() - began_s < 5
  assert store.stats["failed_writes"] == 2
  store.kv_store = kv_store


def test_calls_about_many_pages_are_given_up_as_soon_as_those_about_few(make):
  store = make(timeout_s=0.2, capacity_bytes=20 * (PAGE_BYTES + TRAILER_BYTES))
  held, keys = keys_of("a", 20), keys_of("b", 640)
  write(store, held)
  store._window = 4
  kv_store, store.kv_store = store.kv_store, Silent()
  for call in (
    lambda: store.contains(keys).any(),
    lambda: check_read(store, keys[:60]).any(),
    lambda: store.delete(keys),
    lambda: store.write(keys[:20], pages_of(keys[:20], PAGE_BYTES)),
  ):
    began_s = time.monotonic()
    with contextlib.suppress(OSError):
      assert not call()
    assert time.monotonic() - began_s < 1.5
  store.kv_store = kv_store


def test_a_late_answer_to_a_write_that_was_given_up_says_nothing_about_the_next_one(make):
  store = make(timeout_s=0.2)
  (key,) = keys_of("a", 1)
  kv_store, store.kv_store = store.kv_store, Silent()
  first = store.write([key], pages_of([key], PAGE_BYTES))
  late = store.kv_store.promises[-1]
  store.flush()
  second = store.write([key], pages_of([key], PAGE_BYTES))
  late.set_exception(ValueError("UNAVAILABLE: too late"))
  while store._slots._value < store._window - 1:  # until the late answer was taken in
    time.sleep(0.01)
  store.kv_store.promises[-1].set_result(None)
  assert isinstance(first.exception(timeout=60), OSError)
  assert second.result(timeout=60) == 1
  store.kv_store = kv_store


def test_what_killed_writers_left_is_swept_and_what_living_ones_hold_stays(make, tmp_path):
  store = make(capacity_bytes=100 * PAGE_BYTES)
  keys = keys_of("a", 3)
  write(store, keys)
  left, held = (tmp_path / (store.name(key) + ".__lock") for key in keys[:2])
  left.write_bytes(b"half a page")
  with held.open("wb") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    again = make(capacity_bytes=100 * PAGE_BYTES)
    assert not left.exists()
    assert held.exists()
  assert check_read(again, keys).all()


def test_json_names_a_store(tmp_path):
  spec = {"driver": "file", "path": f"{tmp_path}/deep/"}
  store = TensorStorePages(json.loads(json.dumps(spec)), page_bytes=8, fingerprint="")
  keys = keys_of("a", 3)
  write(store, keys)
  assert np.count_nonzero(check_read(store, keys)) == 3
  assert (tmp_path / "deep").is_dir()
  store.close()
