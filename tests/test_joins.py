"""Joined nodes change no decision: runs with and without, and the state machine on reloads."""

import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from strata_jax import serving_loop, systems
from strata_jax import simulation as sim
from strata_jax.cache_controller import CacheController
from strata_jax.config import CacheConfig, ServingConfig
from strata_jax.cost_model import CostModel
from strata_jax.executors.simulated import SimulatedExecutor
from strata_jax.executors.timeline import CostTimeline
from strata_jax.radix_tree import HiRadixTree
from strata_jax.scheduler.policies import make_policy
from strata_jax.workloads.request import Request
from tests.test_cache_machine import CacheMachine

LONGEST = 700


def workload(rng):
  """Questions about documents, some of which begin alike; some clients give up."""
  ids = lambda count: rng.integers(0, 10**6, count, dtype=np.int32)
  documents = [ids(int(rng.integers(20, 300)))]
  for _ in range(int(rng.integers(1, 6))):
    shared = documents[-1][: int(rng.integers(0, 300))]
    documents.append(np.concatenate([shared, ids(int(rng.integers(20, 300)))]))
  at_s = np.cumsum(rng.exponential(1 / rng.choice([2.0, 20.0, 200.0]), int(rng.integers(10, 60))))
  return [
    Request(
      request_id=index, arrival_s=float(at_s[index]), salt=str(rng.choice(["", "", "", "s"])),
      prompt_ids=np.concatenate(
        [documents[rng.integers(len(documents))][: LONGEST - 80], ids(int(rng.integers(1, 40)))]
      ),
      forced_output_ids=ids(int(rng.integers(1, 30))),
      abort_s=float(rng.exponential(0.3)) if rng.random() < 0.1 else None,
    )
    for index in range(len(at_s))
  ]  # fmt: skip


@pytest.mark.slow
@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
  seed=st.integers(0, 2**32 - 1),
  policy=st.sampled_from(["strata", "hicache_paper"]),
  page_size=st.sampled_from([1, 4, 16]),
  write_policy=st.sampled_from(["write_through", "write_back", "write_through_selective"]),
  device_tokens=st.integers(LONGEST, 2 * LONGEST),
  step_tokens=st.sampled_from([64, 512, 8192]),
  decode_steps=st.sampled_from([1, 8]),
)
def test_runs_with_and_without_joins_are_the_same(
  seed, policy, page_size, write_policy, device_tokens, step_tokens, decode_steps
):
  """While the host has room for all: what it evicts is backed up anew in other pieces."""
  requests = workload(np.random.default_rng(seed))
  serving = ServingConfig(
    requests_in_flight=32, running_requests=8, step_tokens=step_tokens, decode_steps=decode_steps
  )
  costs = CostModel(
    sim.find_profile("h200", "llama31_8b"), sim.io_config(systems.system("strata"))
  )  # fmt: skip
  system = systems.system(policy)
  found = []
  for joins in (True, False):
    controller = CacheController(
      CacheConfig(
        page_size=page_size, device_tokens=device_tokens, host_tokens=10**6,
        write_policy=write_policy,
      ),
      serving, costs=costs.costs(),
    )  # fmt: skip
    controller.tiers.joins = joins
    result = serving_loop.serve(
      requests, controller=controller, serving=serving,
      policy=make_policy(system.policy, system.scheduler_config),
      executor=SimulatedExecutor(CostTimeline(costs)),
    )  # fmt: skip
    controller.check()
    found.append(([record.row() for record in result.requests], controller.stats))
  assert found[0] == found[1]


class ReloadingMachine(CacheMachine):
  """Few long prompts that a small device holds one of at a time."""

  def add_one(self, pick):
    if len(self.h.controller._states) > 6:
      return
    shared = pick.choice((0, 0, 100, 200, 300)) + np.arange(pick.choice((22, 20, 17)))
    own = 500 + 10 * pick.randint(0, 2) + np.arange(pick.randint(1, 3))
    prompt = np.concatenate([shared, own]).astype(np.int32)
    self.h.try_add(prompt, pick.randint(1, 3), salt=pick.choice(("", "", "", "s")))
    self.compare(set())

  def draw_plan(self, view, pick, greed):
    return super().draw_plan(view, pick, max(greed, 0.7))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_reloads_with_several_waiters(monkeypatch, seed):
  joined = []
  join = HiRadixTree._join

  def count(tree, upper, node):
    joined.append(node)
    join(tree, upper, node)

  monkeypatch.setattr(HiRadixTree, "_join", count)
  pick = random.Random(seed)
  machine = ReloadingMachine()
  machine.start(
    page_size=(1, 2)[seed % 2],
    device_pages=pick.choice((26, 30, 36)),
    host_pages=pick.choice((300, 60, 40)),
    write_policy=("write_through", "write_back", "write_through_selective")[seed % 3],
  )
  for _ in range(16):
    machine.serve(pick, 25)
    machine.flush()
  machine.teardown()
  assert joined
