import dataclasses

import pytest

from strata_jax import simulation as sim
from strata_jax import simulation_checks as checks
from strata_jax import systems
from strata_jax.workloads import arrivals, synthetic


@pytest.fixture
def finished():
  """A small run, to be falsified."""
  shape = dataclasses.replace(
    synthetic.LOOGLE, contexts=3, queries=12, mean_input_tokens=500, name="tiny"
  )
  workload = arrivals.poisson(synthetic.documents(shape), 50.0, 0)
  run = sim.simulate(
    workload, sim.find_profile("h200", "llama31_8b"), systems.system("strata"),
    pools=sim.PoolSizes(device_tokens=2000, host_tokens=5000),
  )  # fmt: skip
  return workload, run


def check(workload, run):
  checks.check_run(workload, run.result, run.timeline, run.controller)


def test_a_true_run_passes(finished):
  check(*finished)


def test_a_request_that_never_ended(finished):
  finished[1].result.requests[3].outcome = "waiting"
  with pytest.raises(checks.CheckError, match="expected an end"):
    check(*finished)


def test_a_lost_record(finished):
  finished[1].result.requests.pop()
  with pytest.raises(checks.CheckError, match="one record for each request"):
    check(*finished)


def test_tokens_that_were_computed_and_hit(finished):
  finished[1].result.requests[3].computed_tokens += 1
  with pytest.raises(checks.CheckError, match="exceed its prompt"):
    check(*finished)


def test_time_that_runs_backwards(finished):
  record = finished[1].result.requests[3]
  record.first_token_s = record.arrival_s - 1.0
  with pytest.raises(checks.CheckError, match="time runs backwards"):
    check(*finished)


def test_steps_that_overlap(finished):
  steps = finished[1].result.steps
  at = [i for i, step in enumerate(steps) if step.prefill_requests or step.decode_requests][2]
  steps[at] = steps[at]._replace(started_s=0.0)
  with pytest.raises(checks.CheckError, match="overlaps"):
    check(*finished)


def test_an_end_after_the_end(finished):
  finished[1].result.ended_s -= 0.1
  with pytest.raises(checks.CheckError, match="after the run ended"):
    check(*finished)


def test_bytes_beyond_the_link(finished):
  finished[1].timeline.down.bytes_moved += 1e12
  with pytest.raises(checks.CheckError, match=r"exceed 55\.5 GB/s"):
    check(*finished)


def test_a_link_busy_for_longer_than_the_run(finished):
  finished[1].timeline.up.busy_s = 1e6
  with pytest.raises(checks.CheckError, match="busy for"):
    check(*finished)


def test_a_page_that_is_gone(finished):
  finished[1].controller.tiers.device.allocate(1)
  with pytest.raises(checks.CheckError, match="are not the 2000 there are"):
    check(*finished)
