"""Brings a cache into a known state before a run: contexts on the host, nothing on the device."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from strata_jax import serving_loop
from strata_jax.cache_controller import CacheController
from strata_jax.config import ServingConfig
from strata_jax.executors.protocol import Executor
from strata_jax.metrics import ServingResult
from strata_jax.radix_tree import HOST
from strata_jax.scheduler.policies import Policy
from strata_jax.workloads.request import Request


def flush_device(controller: CacheController, executor: Executor) -> None:
  """Evicts every device page; what write-back then owes to the host is written first.

  Args:
    controller: nothing may be in use in it.
    executor: of its pages; idle.
  """
  tiers = controller.tiers
  tiers.device.free(tiers.allocate(controller.cache.device_pages))  # write-back happens here
  while (work := controller.flush(executor.now_s())) is not None:
    executor.launch(work)
    left = len(work.backups)
    while left:
      for event in executor.wait(None):
        controller.complete(event, executor.now_s())
        left -= 1


def ask_once(
  contexts: Sequence[np.ndarray],
  *,
  controller: CacheController,
  policy: Policy,
  executor: Executor,
  serving: ServingConfig,
  first_id: int = 0,
) -> ServingResult:
  """Serves each context once, one after the other, with one output token.

  Args:
    contexts: prompts, int32 [tokens] each.
    controller: what they leave behind stays in its tiers, as its write policy says.
    policy: from a view to a plan.
    executor: of a real run (a simulated one wants outputs that are forced).
    serving: budgets; its cap on requests in flight does not matter.
    first_id: request ids count up from here.
  """
  requests = [
    Request(request_id=first_id + index, prompt_ids=context, max_new_tokens=1)
    for index, context in enumerate(contexts)
  ]
  one_by_one = dataclasses.replace(serving, requests_in_flight=1)
  return serving_loop.serve(
    requests, controller=controller, policy=policy, executor=executor, serving=one_by_one
  )


def rounds(controller: CacheController) -> int:
  """How often a context has to be asked for until the write policy backs it up."""
  cache = controller.cache
  return cache.selective_threshold if cache.write_policy == "write_through_selective" else 1


def missing_on_host(
  controller: CacheController, contexts: Sequence[np.ndarray]
) -> list[np.ndarray]:
  """The contexts of which a whole page is not in host memory."""
  page_size = controller.cache.page_size
  missing = []
  for context in contexts:
    match = controller.tree.match(context)
    on_host = sum(min(n.end, match.tokens) - n.start for n in match.nodes if n.ready(HOST))
    # A match leaves the last token to be computed, and with it its page.
    if on_host < (len(context) - 1) // page_size * page_size:
      missing.append(context)
  return missing
