"""The checksum tells pages apart, and is the same everywhere: it is part of the file format."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.tiers import page_checksum

LARGE = (1 << 20) + 3 * 4096 + 17  # no cache holds it: its sums are made in blocks
SIZES = (1, 7, 8, 100, 4095, 4096, 4104, 3 * 4096, 8 * 4096 + 13, 1 << 17, LARGE)


def pages_of(count: int, size: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, 256, (count, size), np.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_a_batch_has_the_checksums_of_its_pages(size):
  pages = pages_of(17, size)
  together = page_checksum.checksums(pages)
  apart = [page_checksum.checksums(pages[i : i + 1])[0] for i in range(17)]
  assert together.tolist() == apart
  if size > 8:
    assert len(set(apart)) == 17


def test_the_format_stays():
  page = (np.arange(10000) % 251).astype(np.uint8)[None]
  assert int(page_checksum.checksums(page)[0]) == 0xBBB50E1986A94D14
  assert int(page_checksum.checksums(page[:, :100])[0]) == 0x28339882F49E63EE
  page = (np.arange(LARGE) % 251).astype(np.uint8)[None]
  assert int(page_checksum.checksums(page)[0]) == 0x2085D08D8B4649E6


@given(st.sampled_from(SIZES), st.data())
@settings(max_examples=200, deadline=None)
def test_any_three_bits_that_flip_are_found(size, data):
  page = pages_of(1, size)
  bits = data.draw(
    st.lists(st.integers(0, 8 * size - 1), min_size=1, max_size=3, unique=True), label="bits"
  )
  damaged = page.copy()
  for bit in bits:
    damaged[0, bit // 8] ^= 1 << bit % 8
  assert page_checksum.checksums(page)[0] != page_checksum.checksums(damaged)[0]


def test_the_top_bits_of_any_two_words_are_found():
  page = pages_of(1, 3 * 4096)
  good = page_checksum.checksums(page)[0]
  tops = [7, 8 * 5 + 7, 4096 + 7, 4096 + 8 * 5 + 7, 8192 + 8 * 9 + 7]
  for chosen in itertools.combinations(tops, 2):
    damaged = page.copy()
    damaged[0, list(chosen)] ^= 0x80
    assert page_checksum.checksums(damaged)[0] != good


@pytest.mark.parametrize("block", [8, 64, 512, 4096])
def test_blocks_that_are_swapped_lost_or_shifted_are_found(block):
  page = pages_of(1, 8 * 4096)
  good = page_checksum.checksums(page)[0]
  blocks = page.reshape(-1, block)
  for one, two in ((0, 1), (1, len(blocks) - 1), (0, len(blocks) // 2)):
    damaged = blocks.copy()
    damaged[[one, two]] = damaged[[two, one]]
    assert page_checksum.checksums(damaged.reshape(1, -1))[0] != good
    damaged = blocks.copy()
    damaged[one] = 0
    assert page_checksum.checksums(damaged.reshape(1, -1))[0] != good
  assert page_checksum.checksums(np.roll(page, block, axis=1))[0] != good


@pytest.mark.parametrize("size", SIZES)
def test_sums_may_be_made_page_by_page_and_finished_together(size):
  pages = pages_of(40, size)
  sums = page_checksum.empty_sums(*pages.shape)
  for i in range(40):
    page_checksum.add_up(pages[i : i + 1], sums[i : i + 1])
  np.testing.assert_array_equal(page_checksum.finish(sums), page_checksum.checksums(pages))
  assert page_checksum.finish(sums[:0]).shape == (0,)


def test_constant_pages_differ():
  pages = np.stack([np.full(4096 + 24, value, np.uint8) for value in range(256)])
  assert len(set(page_checksum.checksums(pages).tolist())) == 256


def test_names_come_from_the_keys():
  keys = pages_of(5, 32)
  names = page_checksum.names(keys)
  assert names.tolist() == [int.from_bytes(key[:8].tobytes(), "little") for key in keys]
