"""bfloat16 on a GPU: fused attention, and loads by every back end beside the compute."""

import dataclasses
import functools
import time

import numpy as np
import pytest

from strata_jax import config as config_lib
from strata_jax.executors import choices, protocol, staged_loads
from strata_jax.models import random
from strata_jax.tiers import cuda_copies
from strata_jax.tiers import device as device_tier
from strata_jax.tiers import host as host_tier
from tests.executors import driver

pytestmark = pytest.mark.gpu
TOKENS = 500


@functools.cache
def model():
  config = dataclasses.replace(
    config_lib.MODELS["tiny"], name="small", num_layers=4, hidden_size=512, intermediate_size=1024,
    num_heads=8, head_dim=64, dtype="bfloat16", vocab_size=1024,
  )  # fmt: skip
  return config, random.random_params(config, seed=5)


def make_driver(page_size, **options):
  pages = driver.pages(TOKENS, page_size)
  executor = driver.make_executor(
    *model(), page_size, device_pages=4 * pages, host_pages=2 * pages, **options
  )
  return driver.Driver(executor, page_size)


def prompt(seed=0):
  return np.random.default_rng(seed).integers(0, 1024, TOKENS - 30).tolist()


def page_bytes(drive, slots):
  return device_tier.read_pages(drive.executor.device_pool, slots).view(np.uint8)


@pytest.mark.parametrize("page_size", [1, 16])
def test_fused_attention_computes_the_kv_that_xla_computes(page_size):
  got = {}
  fused = ("cudnn", "hopper") if page_size > 1 else ("cudnn",)
  for attention in (*fused, "xla"):
    drive = make_driver(page_size, attention=attention)
    drive.executor.register(0, protocol.SamplingParams(), None)
    slots = np.random.default_rng(1).permutation(driver.pages(TOKENS, page_size))
    drive.prefill(0, prompt(), slots)  # several pieces, each behind the ones before
    work = drive.decode_work(0, 7, TOKENS - 30, slots, 16)
    drive.step(decodes=(work,), decode_steps=1)
    used = slots[: driver.pages(TOKENS - 30, page_size)]
    got[attention] = device_tier.read_pages(drive.executor.device_pool, used).astype(np.float32)
  for attention in fused:
    np.testing.assert_allclose(got[attention], got["xla"], atol=0.12, rtol=0.05)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
  ("io", "overlap"),
  [("kernel", "layer"), ("kernel", "whole"), ("copy_engine", "layer"), ("memcpy_async", "layer")],
)
def test_warm_equals_cold_and_bytes_survive_beside_compute(io, overlap, page_size):
  check_round_trips(make_driver(page_size, io=io, overlap=overlap), page_size)


@pytest.mark.parametrize("io", ["copy_engine", "memcpy_async"])
def test_layers_that_share_a_gate_change_nothing(io):
  check_round_trips(make_driver(16, io=io, overlap="layer", layers_per_program=(2,)), 16)


@pytest.mark.parametrize("io", ["copy_engine", "memcpy_async", "auto"])
def test_late_copies_change_nothing(monkeypatch, io):
  """Loads and backups that come 20 ms late at every layer or slice; those of auto are staged."""
  monkeypatch.setattr(staged_loads, "SLICE_BYTES", 1)
  if io == "auto":
    monkeypatch.setattr(choices, "loads_aside", lambda *args: choices.STAGED)
    monkeypatch.setattr(choices, "layer_loads", lambda *args: "copy_engine")
    monkeypatch.setattr(choices, "backups_aside", lambda *args: "copy_engine")
  for name in ("submit_each", "submit_batch"):
    monkeypatch.setattr(cuda_copies, name, late(getattr(cuda_copies, name)))
  check_round_trips(make_driver(16, io=io, overlap="layer"), 16)


def late(submit):
  def submit_late(copies, stream):
    time.sleep(0.02)
    submit(copies, stream)

  return submit_late


def check_round_trips(drive, page_size):
  executor = drive.executor
  executor.warmup()
  at = device_tier.buffer_pointers(executor.device_pool)
  host_at = executor.host_pool.unsafe_buffer_pointer()
  pages = driver.pages(TOKENS, page_size)
  free = np.random.default_rng(2).permutation(4 * pages)
  here, there, other, spare = free.reshape(4, pages)
  token_ids = prompt()
  hit = (len(token_ids) - 40) // page_size
  for request_id in range(3):
    executor.register(request_id, protocol.SamplingParams(), None)
  cold = drive.prefill(0, token_ids, here)
  kept = np.random.default_rng(3).permutation(2 * pages)[:hit]
  drive.backup(here[:hit], kept)
  want = page_bytes(drive, here[:hit])
  kept_bytes = host_tier.read_pages(executor.host_pool, kept).view(np.uint8)
  np.testing.assert_array_equal(kept_bytes, want)

  work = lambda request_id, ids, start, slots, **fields: protocol.PrefillWork(
    request_id=request_id, token_ids=np.array(ids[start:], np.int32), start=start,
    page_table=np.asarray(slots[: driver.pages(len(ids), page_size)], np.int32),
    samples=True, **fields,
  )  # fmt: skip
  for round_ in range(3):  # the same step again: nothing in it may race
    slots = (there, spare, there)[round_]
    load = drive.load_work(kept, slots[:hit], transfer_id=1)
    *_, done = drive.step(
      2, loads=(load,),
      prefills=(
        work(0, prompt(1), 0, other),  # cold, beside the load
        work(1, token_ids, hit * page_size, slots, waits_for=(1,)),
      ),
    )  # fmt: skip
    np.testing.assert_array_equal(page_bytes(drive, slots[:hit]), want)
    assert done.near_ties.get(1) or done.tokens[1] == cold.tokens[0]
  # Overwritten on the device, loaded again beside decode steps.
  drive.prefill(0, prompt(4), there)
  load = drive.load_work(kept, there[:hit], transfer_id=1)
  decode = drive.decode_work(1, cold.tokens[0][0], len(token_ids), spare, 8)
  events = drive.step(2, loads=(load,), parked_loads=(1,), decodes=(decode,), decode_steps=8)
  (done,) = (event for event in events if isinstance(event, protocol.StepDone))
  np.testing.assert_array_equal(page_bytes(drive, there[:hit]), want)
  assert len(done.tokens[1]) == 8
  assert executor.recompiles == 0
  assert device_tier.buffer_pointers(executor.device_pool) == at
  assert executor.host_pool.unsafe_buffer_pointer() == host_at


@pytest.mark.parametrize("layers_per_program", [(1,), (4,), (1, 2)])
def test_one_pass_computes_the_kv_that_prefills_and_decodes_apart_compute(layers_per_program):
  """Two rows of the decode batch share most of their context, which is read once for both."""
  page_size, shared = 16, 400
  pages = driver.pages(TOKENS, page_size)
  slots = np.random.default_rng(1).permutation(4 * pages).reshape(4, pages)
  whole = shared // page_size
  slots[1, :whole] = slots[0, :whole]
  questions = prompt(3)[:40]
  got = {}
  for joint_tokens in (0, 256):
    drive = make_driver(page_size, layers_per_program=layers_per_program, joint_tokens=joint_tokens)
    executor = drive.executor
    executor.warmup()
    for request_id in range(4):
      executor.register(request_id, protocol.SamplingParams(), None)
    for row in (0, 1, 2):
      drive.prefill(row, prompt(row // 2), slots[row], start=shared if row == 1 else 0)
    work = protocol.PrefillWork(
      request_id=3, token_ids=np.array(questions, np.int32), start=0,
      page_table=slots[3][: driver.pages(len(questions), page_size)].astype(np.int32), samples=True,
    )  # fmt: skip
    decodes = tuple(drive.decode_work(row, 7 + row, TOKENS - 30, slots[row]) for row in (0, 1, 2))
    (done,) = drive.step(prefills=(work,), decodes=decodes, decode_steps=1)
    assert done.joint == bool(joint_tokens)
    assert executor.recompiles == 0
    used = np.concatenate([slots[row][: driver.pages(TOKENS - 29, page_size)] for row in (0, 1, 2)])
    read = np.concatenate([used, work.page_table])
    got[joint_tokens] = device_tier.read_pages(executor.device_pool, read).astype(np.float32)
  np.testing.assert_allclose(got[0], got[256], atol=0.12, rtol=0.05)
