"""Reads of segments: every page to its place, and what became of each."""

import os
import threading

import numpy as np
import pytest

from strata_jax.tiers import page_checksum, segment_reads
from strata_jax.tiers.segment_index import PAGES_FILE, RawFile, Segment
from tests.tiers.store_pages import keys_of, pages_of

ROWS = 40
SIZES = (72, 5000, 20_000, 300_000)  # small, and large ones that are read one at a time


def segment_of(folder, name: str, page_bytes: int) -> Segment:
  """A segment with pages of its own, less what only a store needs."""
  keys = keys_of(name, ROWS)
  pages = pages_of(keys, page_bytes)
  path = folder / name / PAGES_FILE
  path.parent.mkdir(parents=True)
  pages.tofile(path)
  return Segment(
    path=str(folder / name), namespace=b"", page_bytes=page_bytes,
    keys=np.frombuffer(b"".join(keys), np.uint8).reshape(ROWS, -1),
    expected=page_checksum.checksums(pages), dead=np.zeros(ROWS, bool),
    shadowed=np.zeros(ROWS, bool), bytes=pages.nbytes, used_s=0.0, touched_s=0.0,
  )  # fmt: skip


@pytest.fixture(params=SIZES)
def segments(request, tmp_path) -> list[Segment]:
  return [segment_of(tmp_path, name, request.param) for name in "ab"]


def contents(segments: list[Segment]) -> np.ndarray:
  """uint8 [segments, ROWS, page_bytes]."""
  paths = [os.path.join(segment.path, PAGES_FILE) for segment in segments]
  return np.stack([np.fromfile(path, np.uint8).reshape(ROWS, -1) for path in paths])


def reads_of(segments: list[Segment], order: str, seed: int = 0) -> segment_reads.Reads:
  """All pages of both: as they lie, or in a random order to random places."""
  pages = np.arange(2 * ROWS)
  rng = np.random.default_rng(seed)
  taken = pages if order == "as they lie" else rng.permutation(pages)
  places = rng.permutation(3 * ROWS)[: 2 * ROWS] if order == "scattered" else pages
  return segment_reads.Reads(segments, taken // ROWS, taken % ROWS, places, pages)


def run(reads: segment_reads.Reads, open_file=Segment.open) -> tuple[np.ndarray, np.ndarray]:
  """What became of the pages, and the memory that they went to."""
  out = np.full((3 * ROWS, reads.segments[0].page_bytes), 0xAA, np.uint8)
  job = segment_reads.Job(reads, out, open_file)
  job.work()
  return job.became, out


@pytest.mark.parametrize("order", ["as they lie", "random", "scattered"])
def test_every_page_goes_to_its_place_and_nowhere_else(segments, order):
  reads = reads_of(segments, order)
  became, out = run(reads)
  assert (became == segment_reads.RIGHT).all()
  right = np.full_like(out, 0xAA)
  right[reads.places] = contents(segments)[reads.which, reads.rows]
  np.testing.assert_array_equal(out, right)


@pytest.mark.parametrize("order", ["as they lie", "random", "scattered"])
def test_a_flipped_bit_is_wrong_and_no_other_page_is(segments, order):
  reads = reads_of(segments, order)
  page_bytes = segments[0].page_bytes
  for seed in range(5):
    rng = np.random.default_rng(seed)
    row, byte, bit = int(rng.integers(ROWS)), int(rng.integers(page_bytes)), int(rng.integers(8))
    with open(os.path.join(segments[1].path, PAGES_FILE), "r+b") as file:
      file.seek(row * page_bytes + byte)
      good = file.read(1)
      file.seek(-1, os.SEEK_CUR)
      file.write(bytes([good[0] ^ 1 << bit]))
      file.flush()
      became, _ = run(reads)
      file.seek(-1, os.SEEK_CUR)
      file.write(good)
    bad = (reads.which == 1) & (reads.rows == row)
    assert (became[bad] == segment_reads.WRONG).all()
    assert (became[~bad] == segment_reads.RIGHT).all()


@pytest.mark.parametrize("order", ["as they lie", "random", "scattered"])
def test_pages_beyond_the_end_of_a_file_are_short(segments, order):
  page_bytes = segments[0].page_bytes
  os.truncate(os.path.join(segments[0].path, PAGES_FILE), 7 * page_bytes + page_bytes // 2)
  reads = reads_of(segments, order)
  became, _ = run(reads)
  lost = (reads.which == 0) & (reads.rows >= 7)
  assert (became[lost] == segment_reads.SHORT).all()
  assert (became[~lost] == segment_reads.RIGHT).all()


@pytest.mark.parametrize(
  ("error", "expected"),
  [(FileNotFoundError, segment_reads.GONE), (PermissionError, segment_reads.UNREADABLE)],
)
def test_a_segment_that_cannot_be_opened_takes_its_own_pages_only(segments, error, expected):
  def open_file(segment: Segment) -> RawFile:
    if segment is segments[0]:
      raise error(segment.path)
    return segment.open()

  reads = reads_of(segments, "random")
  became, out = run(reads, open_file)
  assert (became[reads.which == 0] == expected).all()
  there = reads.which == 1
  assert (became[there] == segment_reads.RIGHT).all()
  np.testing.assert_array_equal(out[reads.places[there]], contents(segments)[1][reads.rows[there]])
  became, _ = run(reads.take(reads.which == 0), open_file)  # nothing is left to be read
  assert (became == expected).all()


def test_a_medium_that_fails_fails_its_pages_only(segments, monkeypatch, caplog):
  preadv, fails = os.preadv, segments[0].open().fd

  def read(fd, buffers, offset):
    if fd == fails and offset == 11 * segments[0].page_bytes:
      raise OSError(5, "Input/output error")
    return preadv(fd, buffers, offset)

  monkeypatch.setattr(os, "preadv", read)
  reads = reads_of(segments, "random", seed=3)
  became, _ = run(reads)
  assert became[(reads.which == 0) & (reads.rows == 11)].tolist() == [segment_reads.UNREADABLE]
  assert "cannot be read" in caplog.text
  assert np.count_nonzero(became != segment_reads.RIGHT) <= 2  # what was read along with it


@pytest.mark.parametrize("order", ["as they lie", "scattered"])
def test_several_threads_share_a_job(segments, order):
  reads = reads_of(segments, order)
  out = np.zeros((3 * ROWS, segments[0].page_bytes), np.uint8)
  job = segment_reads.Job(reads, out, Segment.open)
  assert job.units >= out.nbytes * 2 // 3 // segment_reads._UNIT_BYTES
  threads = [threading.Thread(target=job.work) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert job.units == 0
  assert (job.became == segment_reads.RIGHT).all()
  right = contents(segments)[reads.which, reads.rows]
  np.testing.assert_array_equal(out[reads.places], right)


def test_what_nobody_read_is_not_right(segments):
  reads = reads_of(segments, "random")
  out = np.zeros((3 * ROWS, segments[0].page_bytes), np.uint8)
  assert not (segment_reads.Job(reads, out, Segment.open).became == segment_reads.RIGHT).any()


def test_live_pages_leave_out_the_dead_and_the_shadowed(segments):
  segments[0].dead[3] = True
  segments[1].shadowed[[0, 39]] = True
  reads = segment_reads.live_pages(segments)
  assert len(reads.rows) == 2 * ROWS - 3
  became, out = run(reads)
  assert (became == segment_reads.RIGHT).all()
  kept = np.delete(contents(segments).reshape(2 * ROWS, -1), [3, ROWS, 2 * ROWS - 1], axis=0)
  np.testing.assert_array_equal(out[: len(kept)], kept)
  keys = np.concatenate([segment.keys for segment in segments])
  np.testing.assert_array_equal(reads.keys(), np.delete(keys, [3, ROWS, 2 * ROWS - 1], axis=0))
  segments[1].dead[5] = True
  assert reads.dead().sum() == 1


def test_no_live_page(segments):
  for segment in segments:
    segment.dead[:] = True
  reads = segment_reads.live_pages(segments)
  assert len(reads.rows) == 0
  assert run(reads)[0].shape == (0,)
