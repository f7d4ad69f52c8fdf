"""The executor with real weights: exact ids and logits, cold and behind a host round trip."""

import json

import numpy as np
import pytest

from strata_jax.executors import protocol
from tests.executors import driver
from tests.models import paged_forward
from tests.models.real_file import smollm2_file
from tests.shared_data import shared_data

pytestmark = pytest.mark.slow
PAGE_SIZE = 4


@pytest.fixture(scope="module")
def model():
  file = smollm2_file()
  config = file.read_config()
  return config, file.read_params(config)


@pytest.fixture(scope="module")
def goldens():
  return json.loads(shared_data("smollm2/golden_short.json").read_text())


def test_greedy_ids(model, goldens):
  executor = driver.make_executor(*model, PAGE_SIZE, device_pages=64, host_pages=32, context=128)
  drive = driver.Driver(executor, PAGE_SIZE)
  for case in goldens:
    prompt = case["prompt_ids"]
    assert drive.generate(0, prompt, 24, np.arange(32)[::-1]) == case["greedy_ids"]
    hit = (len(prompt) - 1) // PAGE_SIZE
    drive.backup(np.arange(32)[::-1][:hit], np.arange(hit))
    drive.load(np.arange(hit), np.arange(32, 32 + hit))
    slots = np.arange(32, 64)
    assert drive.generate(0, prompt, 24, slots, start=hit * PAGE_SIZE) == case["greedy_ids"]


def test_top_logits(model, goldens):
  config, params = model
  for case in goldens:
    got = paged_forward.prompt_logits(config, params, case["prompt_ids"])
    for token_id, logit in case["top5"]:
      assert got[token_id] == pytest.approx(logit, abs=1e-3)
    assert np.argsort(-got)[:5].tolist() == [token_id for token_id, _ in case["top5"]]


@pytest.mark.gpu
def test_greedy_ids_in_bfloat16_with_fused_attention(goldens):
  """Equal up to the first near tie, cold and behind a host round trip."""
  page_size = 16
  file = smollm2_file()
  config = file.read_config("bfloat16")
  executor = driver.make_executor(
    config, file.read_params(config), page_size, device_pages=16, host_pages=8, context=128
  )
  drive = driver.Driver(executor, page_size)

  def assert_greedy(case, slots, start=0):
    prompt, want = case["prompt_ids"], case["greedy_ids"]
    executor.register(0, protocol.SamplingParams(), None)
    first = drive.prefill(0, prompt, slots, start)
    work = drive.decode_work(0, *first.tokens[0], len(prompt), slots, 23)
    rest = drive.step(decodes=(work,), decode_steps=23)[0]
    executor.release(0)
    got = [*first.tokens[0], *rest.tokens[0]]
    ties = [*first.near_ties.get(0, ()), *(1 + at for at in rest.near_ties.get(0, ()))]
    compared = min([*ties, len(want)])
    assert got[:compared] == want[:compared]
    return compared

  compared = 0
  for case in goldens:
    compared += assert_greedy(case, np.arange(8)[::-1])
    hit = (len(case["prompt_ids"]) - 1) // page_size
    drive.backup(np.arange(8)[::-1][:hit], np.arange(hit))
    drive.load(np.arange(hit), np.arange(8, 8 + hit))
    compared += assert_greedy(case, np.arange(8, 16), start=hit * page_size)
  assert compared >= 24
