"""The executor with real weights: exact ids and logits, cold and behind a host round trip."""

import json

import numpy as np
import pytest

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
