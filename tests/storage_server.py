"""A small real server with a storage tier, for tests; also run as a process of its own.

  python -m tests.storage_server < JOB

JOB is a JSON object: `weights`, `page_size`, `urls`, `goldens` with `prompt_ids` and `greedy_ids`.
Serves the goldens from each store, waiting for storage, and prints a JSON list: for each URL the
outputs and hits of every request.
"""

import json
import sys

import numpy as np

from strata_jax import serving_loop
from strata_jax.cache_controller import CacheController
from strata_jax.config import CacheConfig, ServingConfig, StorageConfig
from strata_jax.executors.buckets import make_buckets
from strata_jax.executors.jax_executor import JaxExecutor
from strata_jax.models.loader import load_model
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import make_policy
from strata_jax.tiers import page_store
from strata_jax.workloads.request import Request

SERVING = ServingConfig(requests_in_flight=4, running_requests=4, batch_requests=4, step_tokens=128)


class StorageServer:
  """One model and page size; every `serve` is a process of its own to the cache: empty pools."""

  def __init__(self, weights: str, page_size: int, *, model: str | None = None, **cache) -> None:
    self.model, self.params, _ = load_model(weights, model, seed=0)
    self.layout = self.model.page_layout(page_size)
    wanted = {"page_size": page_size, "device_tokens": 512, "host_tokens": 4096}
    self.cache = CacheConfig(**(wanted | cache))
    self.fingerprint = f"{weights} {self.model.name}"
    self.buckets = make_buckets(
      self.layout, SERVING, device_pages=self.cache.device_pages,
      context_tokens=min(self.model.context_tokens, self.cache.device_tokens),
    )  # fmt: skip

  def open_store(self, url: str, **options) -> page_store.PageStore:
    return page_store.open_store(
      url, page_bytes=self.layout.page_bytes, fingerprint=self.fingerprint, **options
    )

  def serve(
    self,
    requests: list[Request],
    store: page_store.PageStore | None = None,
    *,
    prefetch: str = "wait_complete",
    storage: dict | None = None,
    serving: ServingConfig = SERVING,
    cache: CacheConfig | None = None,
    progress=None,
    recorder=None,
  ):
    """The result of the run and the controller's counters."""
    cache = cache or self.cache
    executor = JaxExecutor(
      self.model, self.params, self.layout, device_pages=cache.device_pages,
      host_pages=cache.host_pages, buckets=self.buckets, store=store,
    )  # fmt: skip
    executor.warmup()
    config = StorageConfig(**({"min_prefetch_tokens": 1} | (storage or {})))
    controller = CacheController(
      cache, serving, fingerprint=self.fingerprint, context_tokens=self.model.context_tokens,
      storage=None if store is None else config,
    )  # fmt: skip
    pool = executor.host_pool
    pointer = None if pool is None else pool.unsafe_buffer_pointer()
    result = serving_loop.serve(
      requests, controller=controller, executor=executor, serving=serving,
      policy=make_policy("strata", SchedulerConfig(prefetch=prefetch)), progress=progress,
      recorder=recorder,
    )  # fmt: skip
    executor.close()
    controller.check()
    assert result.deadlocks == 0
    assert executor.recompiles == 0
    if pool is not None:
      assert executor.host_pool.unsafe_buffer_pointer() == pointer
    return result, controller.stats


def golden_requests(goldens: list[dict]) -> list[Request]:
  return [
    Request(
      request_id=i,
      prompt_ids=np.asarray(golden["prompt_ids"], np.int32),
      max_new_tokens=len(golden["greedy_ids"]),
    )
    for i, golden in enumerate(goldens)
  ]


def prompts(
  count: int, tokens: int, vocab: int, *, seed: int = 0, outputs: int = 4
) -> list[Request]:
  """Requests with random prompts."""
  rng = np.random.default_rng(seed)
  return [
    Request(
      request_id=i,
      prompt_ids=rng.integers(0, vocab, tokens).astype(np.int32),
      max_new_tokens=outputs,
    )
    for i in range(count)
  ]


def outputs_of(result) -> list[list[int]]:
  return [record.output_ids for record in result.requests]


def main(weights: str, page_size: int, urls: list[str], goldens: list[dict]) -> None:
  server = StorageServer(weights, page_size)
  answers = []
  for url in urls:
    store = server.open_store(url)
    result, stats = server.serve(golden_requests(goldens), store)
    store.close()
    answers.append(
      {
        "outputs": outputs_of(result),
        "storage_hit_tokens": [record.storage_hit_tokens for record in result.requests],
        "hit_tokens": [
          record.device_hit_tokens + record.host_hit_tokens + record.storage_hit_tokens
          for record in result.requests
        ],
        "prefetched_tokens": stats.prefetched_tokens,
      }
    )
  print(json.dumps(answers))


if __name__ == "__main__":
  main(**json.load(sys.stdin))
