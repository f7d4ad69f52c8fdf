"""Policies over the real controller: random prompts, loads that come late, clients that give up."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax import testing
from strata_jax.scheduler.policies import POLICIES, policy_config, schedule
from strata_jax.scheduler.views import Costs
from tests.controller_harness import Harness, tokens

REQUESTS = 30


class _Run:
  """Serves random prompts that share beginnings; events come in random order."""

  def __init__(self, seed: int, policy, config) -> None:
    self.rng = random.Random(seed)
    self.policy, self.config = policy, config
    self.harness = Harness(
      page_size=4,
      device_pages=self.rng.choice((24, 48, 96)),
      host_pages=self.rng.choice((32, 128)),
      step_tokens=self.rng.choice((16, 64)),
      decode_steps=self.rng.choice((1, 4)),
      write_policy=self.rng.choice(("write_through", "write_back")),
      checks=False,
    )
    self.harness.controller.costs = Costs(
      load_s_per_token=1e-3, compute_s_per_token=1e-5, decode_step_s=2e-3
    )
    self.left: dict[int, int] = {}  # outputs to come, by request
    self.over = 0
    self.admitted_after: dict[int, int] = {}

  def prompt(self) -> np.ndarray:
    rng = self.rng
    runs = [(100 * rng.randint(0, 2), rng.choice((8, 40)))]
    if rng.random() < 0.6:
      runs.append((1_000 + 100 * rng.randint(0, 3), rng.randint(1, 12)))
    runs.append((10_000 + rng.randint(0, 500), rng.randint(1, 5)))
    return tokens(*runs)

  def serve(self) -> None:
    arrived = quiet = 0
    while arrived < REQUESTS or self.left:
      before = (arrived, self.over, sum(self.left.values()), len(self.harness.loads))
      if arrived < REQUESTS and self.rng.random() < 0.5:
        outputs = self.rng.randint(1, 6)
        request_id = self.harness.add(self.prompt(), outputs)
        self.left[request_id] = outputs
        arrived += 1
      if self.left and self.rng.random() < 0.05:
        request_id = self.rng.choice(sorted(self.left))
        self.harness.abort(request_id)
        self.end(request_id)
      if self.harness.step is None:
        self.plan()
      self.events()
      after = (arrived, self.over, sum(self.left.values()), len(self.harness.loads))
      quiet = quiet + 1 if before == after else 0
      assert quiet < 200, f"nothing happens any more: {self.harness.view()}"
    if self.harness.step is not None:
      self.harness.step_done()
    self.harness.flush()
    self.harness.transfers_done()

  def plan(self) -> None:
    view = self.harness.view()
    plan = self.policy(view)
    testing.check_plan(view, plan)
    for request in view.waiting:
      assert request.bypasses <= self.config.max_bypasses
      assert request.postponements <= self.config.max_postponements
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    applied = self.harness.apply(**fields)
    assert applied.stale == (), f"{plan} for {view}"
    for refused in applied.refused:
      self.end(refused.request_id)

  def events(self) -> None:
    harness, rng = self.harness, self.rng
    for waits, done in ((harness.loads, harness.load_done), (harness.backups, harness.backup_done)):
      while waits and rng.random() < 0.4:
        done(rng.choice(sorted(waits)))
    if harness.step is not None and rng.random() < 0.8:
      for request_id, sampled in harness.step_done().items():
        if request_id in self.left:
          self.left[request_id] -= len(sampled)
          if self.left[request_id] <= 0:
            harness.finish(request_id)
            self.end(request_id)

  def end(self, request_id: int) -> None:
    del self.left[request_id]
    self.over += 1


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "strata_paper"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_plans_are_carried_out_as_they_stand_and_all_pages_come_back(name, seed):
  config = policy_config(name)
  run = _Run(seed, lambda view: schedule(view, config), config)
  empty = run.harness.free_pages()
  run.serve()
  assert run.over == REQUESTS
  run.harness.controller.check()
  assert run.harness.free_pages() == empty


@pytest.mark.parametrize(
  "changes",
  [
    {"load_or_compute": "split"},
    {"load_or_compute": "compute"},
    {"rolling_loads": False},
    {"join_loading": False},
    {"min_load_tokens": 12},
    {"deferral_threshold_tokens": 3, "ratio_threshold": 0.5, "bundle_slack_tokens": 8},
    {"max_deferrals": 1, "max_postponements": 1, "max_bypasses": 1, "ratio_threshold": 0.5},
    {"running_reserve_tokens": 0},
    {"order": "most_shared"},
  ],
  ids=str,
)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_so_they_are_with_other_settings(changes, seed):
  config = dataclasses.replace(
    policy_config("strata"), **{"deferral_threshold_tokens": 8, "ratio_threshold": 2.0, **changes}
  )
  run = _Run(seed, lambda view: schedule(view, config), config)
  run.serve()
  assert run.over == REQUESTS
  run.harness.controller.check()
