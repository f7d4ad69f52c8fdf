"""Orbax segments: the format, sharing a folder, eviction, compaction, faults of the medium."""

import contextlib
import json
import os
import pathlib
import subprocess
import threading
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest

from strata_jax.tiers import segment_folder
from strata_jax.tiers.orbax_segments import OrbaxSegments
from strata_jax.tiers.segment_index import INDEX_FILE, PAGES_FILE, load_segment
from strata_jax.tiers.segment_save import SegmentSaver
from tests.tiers.store_pages import check_read, keys_of, pages_of

PAGE_BYTES = 4096 + 24


@pytest.fixture
def opened():
  stores = []
  yield stores
  for store in stores:
    store.close()


@pytest.fixture
def make(opened, tmp_path):
  """Opens stores over one folder."""

  def open_store(**changes) -> OrbaxSegments:
    wanted = {
      "page_bytes": PAGE_BYTES,
      "fingerprint": "model",
      "segment_bytes": 10 * PAGE_BYTES,
      "linger_s": 3600.0,
    }
    folder = changes.pop("folder", str(tmp_path / "store"))
    opened.append(OrbaxSegments(folder, **(wanted | changes)))
    return opened[-1]

  return open_store


def write(store, keys) -> int:
  future = store.write(keys, pages_of(keys, store.page_bytes))
  store.flush()
  return future.result(timeout=60)


def segments(tmp_path) -> list[pathlib.Path]:
  return sorted((tmp_path / "store" / "segments").iterdir())


def test_a_segment_is_an_orbax_checkpoint_of_raw_files(make, tmp_path):
  keys = keys_of("a", 4)
  write(make(), keys)
  (segment,) = segments(tmp_path)
  assert (segment / PAGES_FILE).read_bytes() == pages_of(keys, PAGE_BYTES).tobytes()
  restored = ocp.PyTreeCheckpointer().restore(segment)
  np.testing.assert_array_equal(restored["pages"], pages_of(keys, PAGE_BYTES))
  assert np.asarray(restored["index"]).tobytes() == (segment / INDEX_FILE).read_bytes()
  metadata = json.loads((segment / "_METADATA").read_text())
  assert metadata["custom_metadata"] == {"fingerprint": "model", "page_bytes": PAGE_BYTES}
  assert sum(path.is_file() for path in segment.rglob("*")) <= 8


def test_many_pages_fill_many_segments(make, tmp_path):
  store = make()
  keys = keys_of("a", 35)
  assert write(store, keys) == 35
  # Two threads commit: which of them is first is open.
  sizes = sorted(load_segment(str(path)).pages for path in segments(tmp_path))
  assert sizes == [5, 10, 10, 10]
  assert check_read(store, keys).all()
  order = np.random.default_rng(0).permutation(35)
  assert check_read(store, [keys[i] for i in order]).all()


def test_pages_become_durable_without_a_flush(make):
  store = make(linger_s=0.05)
  keys = keys_of("a", 3)
  written = store.write(keys, pages_of(keys, PAGE_BYTES))
  assert store.longest_prefix(keys) == 3  # found at once
  assert check_read(store, keys).all()
  assert written.result(timeout=30) == 3


def test_a_look_at_the_folder_during_a_commit_changes_nothing(make, monkeypatch):
  """Between Orbax's rename and the index's update another thread may find the segment first."""
  store = make()
  save = SegmentSaver.save

  def save_and_look(self, *arguments):
    save(self, *arguments)
    store.contains(keys)

  monkeypatch.setattr(SegmentSaver, "save", save_and_look)
  keys = keys_of("a", 25)
  write(store, keys)
  assert check_read(store, keys).all()
  store.compact()
  assert check_read(store, keys).all()
  assert store.usage().pages == 25


def test_unfinished_segments_of_the_dead_are_swept_and_those_of_the_living_stay(make, tmp_path):
  living = make()
  root = tmp_path / "store"
  dead = root / "segments" / "0123456789ab-00000001.orbax-checkpoint-tmp"
  unfinished = root / "segments" / f"{living._folder.writer}-0000ffff.orbax-checkpoint-tmp"
  trash = root / "trash" / "0123456789ab-00000002.aa"
  for folder in (dead, unfinished, trash):
    folder.mkdir()
    (folder / "half").write_bytes(b"x" * 1000)
  (root / "writers" / "0123456789ab").touch()
  second = make()
  assert second.stats["swept_leftovers"] == 2
  assert not dead.exists()
  assert not trash.exists()
  assert unfinished.exists()
  assert sorted(os.listdir(root / "writers")) == sorted(
    [living._folder.writer, second._folder.writer]
  )
  living.close()
  make()
  assert not unfinished.exists()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing", "no pages"])
def test_a_segment_with_a_bad_index_is_left_out_and_its_space_comes_back(
  make, tmp_path, damage, caplog
):
  store = make()
  keys = keys_of("a", 20)
  write(store, keys)
  store.close()
  first, second = segments(tmp_path)
  index = first / INDEX_FILE
  data = bytearray(index.read_bytes())
  if damage == "truncated":
    index.write_bytes(data[: len(data) // 2])
  elif damage == "flipped":
    data[len(data) // 2] ^= 4
    index.write_bytes(data)
  elif damage == "empty":
    index.write_bytes(b"")
  elif damage == "missing":
    index.unlink()
  else:
    (first / PAGES_FILE).unlink()
  again = make()
  assert "left out" in caplog.text
  present = check_read(again, keys)
  assert np.count_nonzero(present) == 10
  assert segments(tmp_path) == [second]
  assert write(again, keys) == 10
  assert check_read(again, keys).all()


def test_pages_beyond_a_truncated_file_are_misses_from_the_start(make, tmp_path):
  keys = keys_of("a", 10)
  store = make()
  write(store, keys)
  store.close()
  (segment,) = segments(tmp_path)
  os.truncate(segment / PAGES_FILE, 3 * PAGE_BYTES + 7)
  again = make()
  assert again.longest_prefix(keys) == 3
  assert check_read(again, keys).tolist() == [True] * 3 + [False] * 7


def test_swapped_files_of_pages_are_misses(make, tmp_path, caplog):
  keys = keys_of("a", 20)
  store = make()
  write(store, keys)
  store.close()
  one, two = (path / PAGES_FILE for path in segments(tmp_path))
  one.rename(tmp_path / "aside")
  two.rename(one)
  (tmp_path / "aside").rename(two)
  assert not check_read(make(), keys).any()
  assert "not what was written" in caplog.text


def test_a_bad_page_stays_a_miss_for_later_processes(make):
  store = make()
  keys = keys_of("a", 10)
  write(store, keys)
  folder, row = store.locate(keys[4])
  with open(os.path.join(folder, PAGES_FILE), "r+b") as file:
    file.seek(row * PAGE_BYTES + 100)
    file.write(b"\0\0\0\0\0\0\0\0")
  assert not check_read(store, keys)[4]
  assert make().longest_prefix(keys) == 4


# Sharing a folder.


def test_pages_written_by_two_at_once_are_kept_once_in_the_end(make, monkeypatch, tmp_path):
  one, two = make(), make()
  keys = keys_of("a", 10)
  save = SegmentSaver.save
  both = threading.Barrier(2, timeout=60)

  def save_together(self, *arguments):
    with contextlib.suppress(threading.BrokenBarrierError):
      both.wait()
    save(self, *arguments)

  monkeypatch.setattr(SegmentSaver, "save", save_together)
  futures = [store.write(keys, pages_of(keys, PAGE_BYTES)) for store in (one, two)]
  threads = [threading.Thread(target=store.flush) for store in (one, two)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  both.abort()
  assert [future.result() for future in futures] == [10, 10]
  for store in (one, two):
    assert store.usage().pages == 10
    assert check_read(store, keys).all()
  one.compact()
  two.compact()
  assert len(segments(tmp_path)) == 1
  for store in (one, two, make()):
    assert store.usage().pages == 10
    assert check_read(store, keys).all()


def test_pages_that_another_wrote_before_the_commit_are_dropped(make):
  one, two = make(), make()
  keys = keys_of("a", 12)
  late = two.write(keys[:6], pages_of(keys[:6], PAGE_BYTES))  # fewer than a segment: it waits
  assert write(one, keys[3:]) == 9
  two.flush()
  assert late.result(timeout=60) == 3
  assert two.usage().pages == 12
  assert check_read(two, keys).all()


def test_a_segment_taken_away_at_once_was_durable_all_the_same(make, monkeypatch):
  """Another process merges small segments as soon as they are there."""
  writer, other = make(), make()
  keys = keys_of("a", 5)
  save = SegmentSaver.save

  def save_and_lose(self, *arguments):
    save(self, *arguments)
    monkeypatch.setattr(SegmentSaver, "save", save)
    write(other, keys[4:])
    other.compact()

  write(writer, keys[:2])
  monkeypatch.setattr(SegmentSaver, "save", save_and_lose)
  assert write(writer, keys[2:4]) == 2
  assert writer.stats["failed_writes"] == 0
  assert writer.usage().pages == 5
  assert check_read(writer, keys).all()


def test_a_segment_merged_elsewhere_is_found_again_by_a_reader(make):
  writer, reader = make(), make()
  keys = keys_of("a", 8)
  for key in keys:
    write(writer, [key])
  assert reader.longest_prefix(keys) == 8
  writer.compact()
  assert check_read(reader, keys).all()


def test_a_segment_evicted_elsewhere_is_a_miss(make):
  writer, reader = make(), make()
  keys = keys_of("a", 8)
  write(writer, keys)
  assert reader.longest_prefix(keys) == 8
  plan = reader._plan

  def plan_then_clear(*arguments):
    runs = plan(*arguments)
    writer.clear()
    return runs

  reader._plan = plan_then_clear
  assert not check_read(reader, keys).any()
  assert reader.usage().pages == 0


def test_duplicates_count_again_when_the_other_copy_goes(make, tmp_path):
  store = make()
  keys = keys_of("a", 5)
  write(store, keys)
  (segment,) = segments(tmp_path)
  twin = segment.parent / "ffffffffffff-00000001"
  subprocess.run(["cp", "-r", segment, twin], check=True)
  assert store.usage().pages == 5
  store._folder.discard(segment.name)
  assert store.usage().pages == 5
  assert check_read(store, keys).all()
  assert segments(tmp_path) == [twin]


# Space.


def test_usage_is_what_the_files_take(make, tmp_path):
  store = make()
  write(store, keys_of("a", 25))
  paths = (tmp_path / "store" / "segments").rglob("*")
  assert store.usage().bytes == sum(path.stat().st_size for path in paths if path.is_file())


def test_recency_outlives_the_process_and_counts_for_others(make, tmp_path):
  store = make()
  groups = [keys_of(name, 10) for name in "abc"]
  for keys in groups:
    write(store, keys)
  old_s = time.time() - 1000
  for path in segments(tmp_path):
    os.utime(path, (old_s, old_s))
  store.close()
  first = make()
  second = make(capacity_bytes=80 * PAGE_BYTES)
  check_read(first, groups[0])  # another process uses the first segment
  for name in "defgh":
    write(second, keys_of(name, 10))
  assert check_read(second, groups[0]).all()
  assert not check_read(second, groups[1]).any()


def test_small_segments_are_merged_in_the_background(make, tmp_path):
  store = make(linger_s=0.02)
  keys = keys_of("a", 8)
  for key in keys:
    write(store, [key])
  deadline_s = time.monotonic() + 30
  while len(segments(tmp_path)) > 3 and time.monotonic() < deadline_s:
    time.sleep(0.02)
  assert len(segments(tmp_path)) <= 3
  assert check_read(store, keys).all()
  assert store.stats["compactions"] >= 1


def test_deleted_pages_give_their_space_back(make, tmp_path):
  store = make()
  keys = keys_of("a", 30)
  write(store, keys)
  before = store.usage().bytes
  assert store.delete(keys[::2]) == 15
  store.compact()
  assert store.usage().bytes < 0.7 * before
  assert store.usage().pages == 15
  assert check_read(store, keys).tolist() == [i % 2 == 1 for i in range(30)]
  again = make()
  assert again.usage() == store.usage()


def test_a_page_deleted_during_a_compaction_stays_deleted(make, monkeypatch):
  store = make()
  keys = keys_of("a", 6)
  for key in keys:
    write(store, [key])
  save = SegmentSaver.save

  def delete_and_save(self, *arguments):
    store.delete(keys[2:3])
    save(self, *arguments)

  monkeypatch.setattr(SegmentSaver, "save", delete_and_save)
  store.compact()
  assert store.contains(keys).tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize("kept", [0, 2])
def test_segments_evicted_after_they_were_chosen_are_passed_over(make, monkeypatch, kept):
  store = make()
  keys = keys_of("a", 6)
  for key in keys:
    write(store, [key])
  choose = store._choose
  pages = {segment.name: segment.live_pages for segment in store._index.segments.values()}
  assert len(pages) >= 3
  left = []

  def choose_and_evict(force):
    names = choose(force)
    assert set(names) == set(pages)
    left.extend(names[:kept])
    for name in names[kept:]:
      store._index.remove(name)
      store._folder.discard(name)
    monkeypatch.setattr(store, "_choose", choose)
    return names

  choices = iter([choose, choose_and_evict])  # a look before the lock is taken, then the choice
  monkeypatch.setattr(store, "_choose", lambda force: next(choices)(force))
  assert store.compact() == kept
  assert check_read(store, keys).sum() == sum(pages[name] for name in left)


def test_two_do_not_compact_at_once(make):
  one, two = make(), make()
  for key in keys_of("a", 6):
    write(one, [key])
  lock = two._folder.lock_compaction()
  assert one.compact() == 0
  os.close(lock)
  assert one.compact() > 0


# Faults of the medium.


def test_a_failed_commit_fails_its_writes_and_leaves_nothing(make, monkeypatch, tmp_path):
  store = make()
  keys = keys_of("a", 10)
  save = SegmentSaver.save

  def fail(self, path, *arguments):
    save(self, path + ".half", *arguments)
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(SegmentSaver, "save", fail)
  future = store.write(keys, pages_of(keys, PAGE_BYTES))
  store.flush()
  with pytest.raises(OSError, match="No space"):
    future.result(timeout=60)
  assert store.stats["failed_writes"] == 1
  assert not check_read(store, keys).any()
  assert store.usage().pending_pages == 0
  assert not segments(tmp_path)
  monkeypatch.setattr(SegmentSaver, "save", save)
  assert write(store, keys) == 10
  assert check_read(store, keys).all()


def test_a_compaction_that_fails_takes_neither_pages_nor_threads_with_it(make, monkeypatch, caplog):
  store = make(linger_s=0.02)
  tried = threading.Event()

  def fail(*, force):
    tried.set()
    raise MemoryError("no room for the pages of a segment")

  monkeypatch.setattr(store, "compact", fail)
  keys = keys_of("a", 2)
  assert write(store, keys[:1]) == 1
  tried.clear()
  assert tried.wait(timeout=60)  # by a thread with nothing else to do
  assert write(store, keys[1:]) == 1
  assert check_read(store, keys).all()
  assert "a compaction failed: no room" in caplog.text


def mounted(folder: pathlib.Path, *options: str):
  """A file system of its own at a folder, or a skip."""
  folder.mkdir(exist_ok=True)
  command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
  if subprocess.run(command, capture_output=True, check=False).returncode:
    pytest.skip("needs the right to mount file systems")
  return folder


@pytest.fixture
def small_disk(tmp_path):
  folder = mounted(tmp_path / "disk", "size=1m")
  yield folder
  subprocess.run(["umount", "-l", str(folder)], check=True)


# Orbax closes its event loop while TensorStore still reports the segment's other array to it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_fails_writes_and_nothing_else(make, opened, small_disk):
  store = make(folder=str(small_disk / "store"), segment_bytes=60 * PAGE_BYTES)
  keys = keys_of("a", 600)
  futures = [
    store.write(keys[i : i + 60], pages_of(keys[i : i + 60], PAGE_BYTES)) for i in range(0, 600, 60)
  ]
  store.flush()
  errors = [future.exception(timeout=60) for future in futures]
  assert any(error is None for error in errors)
  assert any(isinstance(error, OSError) for error in errors)
  right = check_read(store, keys)
  for i, error in enumerate(errors):
    assert right[60 * i : 60 * i + 60].all() == (error is None)
  assert store.usage().pages == np.count_nonzero(right)
  names = os.listdir(small_disk / "store" / "segments")
  assert all(segment_folder._SEGMENT.fullmatch(name) for name in names)
  store.clear()
  assert write(store, keys[:60]) == 60
  store.close()


def test_a_read_only_disk_is_read_and_not_written(make, opened, small_disk, caplog):
  keys = keys_of("a", 30)
  store = make(folder=str(small_disk / "store"))
  write(store, keys[:20])
  store.close()
  subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
  frozen = make(folder=str(small_disk / "store"))
  assert "read only" in caplog.text
  assert check_read(frozen, keys).tolist() == [True] * 20 + [False] * 10
  with pytest.raises(OSError, match="Read-only"):
    frozen.write(keys, pages_of(keys, PAGE_BYTES)).result(timeout=60)
  frozen.close()


def test_a_folder_that_vanishes_gives_misses(make, tmp_path, caplog):
  store = make()
  keys = keys_of("a", 10)
  write(store, keys)
  (tmp_path / "store").rename(tmp_path / "away")
  assert not check_read(store, keys_of("b", 3)).any()
  assert "cannot be read" in caplog.text
  (tmp_path / "away").rename(tmp_path / "store")
  assert check_read(store, keys).all()


def test_a_folder_of_something_else_is_refused(make, tmp_path):
  (tmp_path / "store").mkdir()
  (tmp_path / "store" / "thesis.tex").touch()
  with pytest.raises(ValueError, match="expected an empty folder or a store"):
    make()
  (tmp_path / "file").touch()
  with pytest.raises(NotADirectoryError, match="expected a folder"):
    make(folder=str(tmp_path / "file"))


def test_many_may_make_the_same_folder_at_once(tmp_path):
  for attempt in range(20):
    folder = str(tmp_path / str(attempt))
    stores, errors = [], []

    def open_one(folder=folder, stores=stores, errors=errors) -> None:
      try:
        stores.append(OrbaxSegments(folder, page_bytes=64, fingerprint="model"))
      except Exception as error:
        errors.append(error)

    threads = [threading.Thread(target=open_one) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    for store in stores:
      store.close()
    assert not errors
    assert len(stores) == 4


def test_a_closed_store_leaves_no_writer_behind(make, tmp_path):
  store = make()
  write(store, keys_of("a", 1))
  store.close()
  assert not os.listdir(tmp_path / "store" / "writers")
  with pytest.raises(ValueError, match="closed"):
    store.write(keys_of("b", 1), pages_of(keys_of("b", 1), PAGE_BYTES))
