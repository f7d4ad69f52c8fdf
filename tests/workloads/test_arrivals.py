import numpy as np
import pytest

from strata_jax.workloads import arrivals, synthetic


def times(workload):
  return arrivals.arrivals_of(workload.requests)


def test_poisson_scales_one_draw_by_the_rate():
  workload = synthetic.no_reuse(requests=400)
  slow, fast = (times(arrivals.poisson(workload, rate, seed=7)) for rate in (1.0, 4.0))
  np.testing.assert_allclose(np.array(slow) / 4.0, fast)
  assert slow[-1] / 400 == pytest.approx(1.0, rel=0.15)
  assert slow == times(arrivals.poisson(workload, 1.0, seed=7))
  assert slow != times(arrivals.poisson(workload, 1.0, seed=8))


def test_fixed_burst_and_closed():
  workload = synthetic.no_reuse(requests=5)
  assert times(arrivals.fixed(workload, 2.0)) == [0.0, 0.5, 1.0, 1.5, 2.0]
  assert times(arrivals.burst(workload, 2.0, 2)) == [0.0, 0.0, 1.0, 1.0, 2.0]
  assert times(arrivals.closed(arrivals.fixed(workload, 2.0))) == []


def test_followers_keep_their_think_time():
  workload = arrivals.poisson(synthetic.conversations(synthetic.SHAREGPT), 3.0, seed=0)
  for request in workload.requests:
    assert (request.arrival_s is None) == (request.follows is not None)
  faster = arrivals.speed_up(workload, 2.0)
  for before, after in zip(workload.requests, faster.requests, strict=True):
    assert after.think_s == before.think_s / 2.0
    if before.arrival_s is not None:
      assert after.arrival_s == before.arrival_s / 2.0


@pytest.mark.parametrize(
  "call",
  [
    lambda w: arrivals.poisson(w, 0.0, 0),
    lambda w: arrivals.fixed(w, float("nan")),
    lambda w: arrivals.burst(w, 1.0, 0),
    lambda w: arrivals.speed_up(w, -1.0),
  ],
)
def test_impossible_rates_are_refused(call):
  with pytest.raises(ValueError, match="expected"):
    call(synthetic.no_reuse(requests=2))
