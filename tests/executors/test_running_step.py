import jax.numpy as jnp
import pytest

from strata_jax import sampling
from strata_jax.executors.running_step import RunningStep


def make(**fields):
  return RunningStep(step_id=3, started_s=1.0, waits=True, near_tie=0.1, **fields)


def sampled(token_ids, gaps):
  return sampling.Sampled(jnp.array(token_ids), jnp.array(gaps)).packed()


def test_tokens_and_near_ties_of_all_results_whenever_they_are_taken():
  results = [
    ((7, None), sampled([10, 11, 0], [0.5, 0.0, 0.0])),
    ((7, 8), sampled([12, 13, 0], [0.05, 0.1, 0.0])),
    ((8, 7), sampled([14, 15, 0], [0.0, 3.0, 0.0])),
  ]
  events = []
  for taken in ((), (1,), (1, 1), (2,), (1, 2), (3,)):
    step = make()
    for result in results:
      step.add_result(*result)
      step.block()
    for count in taken:
      step.take(count)
    assert step.results == len(results) - sum(taken)
    events.append(step.done(4.0))
  assert events[0].tokens == {7: (10, 12, 15), 8: (13, 14)}
  assert events[0].near_ties == {7: (1,), 8: (1,)}  # 0.1 is no nearer than 0.1
  assert all(event == events[0] for event in events)


def test_times():
  done = make(stall_end_s=1.5, prefill_end_s=3.0).done(4.0)
  assert (done.step_id, done.started_s, done.at_s, done.prefill_end_s) == (3, 1.0, 4.0, 3.0)
  assert (done.stall_s, done.compute_s) == pytest.approx((0.5, 1.5))
  assert done.tokens == {}


def test_waiting_that_was_measured_counts_instead_of_the_first_layer():
  done = make(stall_end_s=1.1, prefill_end_s=3.0, stalled_s=lambda: 0.75).done(4.0)
  assert (done.stall_s, done.compute_s) == pytest.approx((0.75, 1.25))
