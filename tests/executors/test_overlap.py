"""Loads beside compute, layer by layer: the same tokens and the same bytes as loading first."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from strata_jax import config as config_lib
from strata_jax.executors import protocol
from strata_jax.models import random
from strata_jax.tiers import device as device_tier
from tests.executors import driver

PAGE_SIZE = 4
DEVICE_PAGES, HOST_PAGES = 96, 64


@functools.cache
def model(num_layers):
  config = dataclasses.replace(config_lib.MODELS["tiny"], num_layers=num_layers)
  return config, random.random_params(config, seed=5)


def make_driver(overlap, num_layers=3, context=128, **options):
  executor = driver.make_executor(
    *model(num_layers), PAGE_SIZE, device_pages=DEVICE_PAGES, host_pages=HOST_PAGES,
    context=context, overlap=overlap, **options,
  )  # fmt: skip
  return driver.Driver(executor, PAGE_SIZE)


def prompts():
  rng = np.random.default_rng(1)
  return [rng.integers(0, 128, size).tolist() for size in (70, 33, 50)]


def fill_host(drive):
  """KV of whole pages of all prompts to host memory; host slots by prompt, scattered."""
  free, kept = np.random.default_rng(2).permutation(HOST_PAGES), []
  for request_id, prompt in enumerate(prompts()):
    drive.executor.register(request_id, protocol.SamplingParams(), None)
    pages = (len(prompt) - 1) // PAGE_SIZE
    drive.prefill(request_id, prompt, np.arange(20))
    kept.append(free[:pages])
    free = free[pages:]
    drive.backup(np.arange(pages), kept[-1])
  return kept


def prefill_work(request_id, prompt, hit_pages, slots, **fields):
  return protocol.PrefillWork(
    request_id=request_id, token_ids=np.array(prompt[hit_pages * PAGE_SIZE :], np.int32),
    start=hit_pages * PAGE_SIZE,
    page_table=np.asarray(slots, np.int32)[: driver.pages(len(prompt), PAGE_SIZE)],
    samples=True, **fields,
  )  # fmt: skip


def warm_step(drive):
  """One step that loads for two prefills, and for nobody yet, beside a third that is cold."""
  kept = fill_host(drive)
  slots = np.random.default_rng(3).permutation(DEVICE_PAGES).reshape(3, 32)
  loads = tuple(
    drive.load_work(kept[i], slots[i][: len(kept[i])], transfer_id=10 + i) for i in range(3)
  )
  works = (
    prefill_work(0, prompts()[0], 10, slots[0], waits_for=(10,)),
    prefill_work(1, prompts()[1], len(kept[1]), slots[1], waits_for=(11,)),
  )
  events = drive.step(4, loads=loads, prefills=works, parked_loads=(12,))
  return events, device_tier.read_pages(drive.executor.device_pool, np.arange(DEVICE_PAGES))


@pytest.mark.parametrize("num_layers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_prefills_with_loads_beside_them(num_layers):
  cold = make_driver("whole", num_layers)
  expected = [cold.generate(i, prompt, 2, np.arange(20)) for i, prompt in enumerate(prompts())]
  events, pool = warm_step(make_driver("layer", num_layers))
  *loaded, done = events
  assert {event.transfer_id for event in loaded} == {10, 11, 12}
  assert isinstance(done, protocol.StepDone)
  assert done.tokens == {0: (expected[0][0],), 1: (expected[1][0],)}
  assert 0 < done.stall_s < done.prefill_end_s - done.started_s
  _, whole = warm_step(make_driver("whole", num_layers))
  np.testing.assert_array_equal(pool, whole)


def test_a_decode_takes_the_loads_along():
  got = {}
  for overlap in ("layer", "whole"):
    drive = make_driver(overlap)
    kept = fill_host(drive)
    first = drive.prefill(0, prompts()[0], np.arange(20)).tokens[0][0]
    work = drive.decode_work(0, first, len(prompts()[0]), np.arange(20), 3)
    load = drive.load_work(kept[1], np.arange(40, 40 + len(kept[1])), transfer_id=5)
    loaded, done = drive.step(2, loads=(load,), parked_loads=(5,), decodes=(work,), decode_steps=3)
    assert loaded.transfer_id == 5
    assert done.stall_s == 0  # nobody waited
    got[overlap] = (
      done.tokens,
      device_tier.read_pages(drive.executor.device_pool, np.arange(96)).tobytes(),
    )
  assert got["layer"] == got["whole"]


def test_more_pages_than_fit_beside_are_loaded_first():
  drive = make_driver("layer", context=80)  # shares of at most 20 pages
  drive.executor.register(0, protocol.SamplingParams(), None)
  drive.prefill(0, prompts()[0], np.arange(20))
  before = device_tier.read_pages(drive.executor.device_pool, np.arange(16))
  for first in range(0, 64, 16):
    drive.backup(np.arange(16), np.arange(first, first + 16))
  load = drive.load_work(np.arange(50), np.arange(40, 90))
  drive.step(2, loads=(load,), prefills=(prefill_work(0, prompts()[0], 0, np.arange(20)),))
  after = device_tier.read_pages(drive.executor.device_pool, np.arange(40, 90))
  np.testing.assert_array_equal(after, before[np.arange(50) % 16])


def test_some_layers_in_one_program_compute_the_same():
  got = []
  for layers_per_program in ((1,), (2,), (1, 2)):  # of 3 layers
    drive = make_driver("whole", layers_per_program=layers_per_program)
    ids = drive.generate(0, prompts()[0], 4, np.arange(20))
    got.append((ids, device_tier.read_pages(drive.executor.device_pool, np.arange(20))))
  for ids, pages in got[1:]:
    assert ids == got[0][0]
    np.testing.assert_allclose(pages, got[0][1], atol=1e-5)
  with pytest.raises(ValueError, match=r"layers_per_program: expected numbers >= 1, got \(1, 0\)"):
    make_driver("whole", layers_per_program=(1, 0))


@pytest.mark.slow
@pytest.mark.parametrize("layers_per_program", [(1,), (2,), (1, 2)])
def test_nothing_compiles_after_the_warm_up(layers_per_program):
  # A width that no other test compiles.
  context = 112 + 4 * sum(layers_per_program)
  drive = make_driver("layer", context=context, layers_per_program=layers_per_program, chunks=(16,))
  drive.executor.warmup()
  assert not np.any(device_tier.read_pages(drive.executor.device_pool, np.arange(DEVICE_PAGES)))
  kept = fill_host(drive)
  load = drive.load_work(kept[0], np.arange(30, 30 + len(kept[0])))
  work = prefill_work(0, prompts()[0], 4, np.arange(30, 60), waits_for=(8,))
  drive.step(2, loads=(load,), prefills=(work,))
  drive.load(kept[1], np.arange(len(kept[1])))
  drive.step(decodes=(drive.decode_work(0, 1, 60, np.arange(30, 60)),))
  assert drive.executor.recompiles == 0


@pytest.mark.parametrize(
  ("options", "match"),
  [
    ({"overlap": "half"}, "overlap: expected one of layer, whole, auto, got 'half'"),
    ({"attention": "cudnn"}, "attention 'cudnn': expected a GPU, .* got none, float32"),
  ],
)
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="about a CPU")
def test_what_cannot_be_is_refused(options, match):
  with pytest.raises(ValueError, match=match):
    driver.make_executor(*model(1), PAGE_SIZE, device_pages=8, **options)
