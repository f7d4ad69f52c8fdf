"""A real model through the whole loop: exact outputs, whatever tier the KV came from."""

import json

import numpy as np
import pytest

from strata_jax import serving_loop
from strata_jax.cache_controller import CacheController
from strata_jax.config import CacheConfig, ServingConfig
from strata_jax.executors.buckets import make_buckets
from strata_jax.executors.jax_executor import JaxExecutor
from strata_jax.models.loader import load_model
from strata_jax.scheduler.policies import make_policy
from strata_jax.workloads.request import Request
from tests.shared_data import shared_data

_DEVICE_TOKENS = 512  # the longest golden needs 496: most of what was computed has to leave
_SERVING = ServingConfig(
  requests_in_flight=4, running_requests=4, batch_requests=4, step_tokens=128
)


class _Server:
  def __init__(self, page_size: int) -> None:
    model, params, _ = load_model(str(shared_data("stories260K")))
    layout = model.page_layout(page_size)
    self.cache = CacheConfig(page_size=page_size, device_tokens=_DEVICE_TOKENS, host_tokens=4096)
    self.executor = JaxExecutor(
      model,
      params,
      layout,
      device_pages=self.cache.device_pages,
      host_pages=self.cache.host_pages,
      buckets=make_buckets(
        layout,
        _SERVING,
        device_pages=self.cache.device_pages,
        context_tokens=model.context_tokens,
      ),
    )
    self.executor.warmup()

  def serve(self, goldens, *, one_by_one=False, **cache_fields):
    requests = [
      Request(
        request_id=i,
        prompt_ids=np.asarray(golden["prompt_ids"], np.int32),
        max_new_tokens=len(golden["greedy_ids"]),
      )
      for i, golden in enumerate(goldens)
    ]
    serving = _SERVING
    if one_by_one:
      serving = ServingConfig(requests_in_flight=1, running_requests=1, step_tokens=128)
    cache = CacheConfig(**({f: getattr(self.cache, f) for f in (
      "page_size", "device_tokens", "host_tokens")} | cache_fields))  # fmt: skip
    controller = CacheController(cache, serving, context_tokens=512)
    result = serving_loop.serve(
      requests,
      controller=controller,
      policy=make_policy("strata"),
      executor=self.executor,
      serving=serving,
    )
    controller.check()
    assert result.deadlocks == 0
    assert [r.output_ids for r in result.requests] == [g["greedy_ids"] for g in goldens]
    assert self.executor.recompiles == 0
    return result.requests


@pytest.fixture(scope="module", params=[1, 4, 16])
def server(request):
  return _Server(request.param)


@pytest.fixture(scope="module")
def goldens():
  return json.loads(shared_data("stories260K/golden.json").read_text())


@pytest.mark.slow
def test_cold(server, goldens):
  records = server.serve(goldens, enabled=False)
  assert all(r.computed_tokens == r.prompt_tokens for r in records)


@pytest.mark.slow
def test_from_device_hits(server, goldens):
  twice = [golden for golden in goldens for _ in range(2)]
  records = server.serve(twice, one_by_one=True, host_tokens=0)
  page_size = server.cache.page_size
  for golden, record in zip(goldens, records[1::2], strict=True):
    tokens = len(golden["prompt_ids"])
    assert record.device_hit_tokens == (tokens - 1) // page_size * page_size
    assert record.host_hit_tokens == 0


@pytest.mark.slow
def test_after_a_round_trip_through_the_host(server, goldens):
  records = server.serve(goldens + goldens, one_by_one=True)
  again = records[len(goldens) :]
  page_size = server.cache.page_size
  for record in again:
    hits = record.device_hit_tokens + record.host_hit_tokens
    assert hits == (record.prompt_tokens - 1) // page_size * page_size
  assert sum(r.host_hit_tokens for r in again) > 256


@pytest.mark.slow
def test_batched_and_in_chunks(server, goldens):
  records = server.serve(goldens + goldens)
  assert sum(r.host_hit_tokens for r in records) > 0
  assert sum(r.device_hit_tokens for r in records) > 0
