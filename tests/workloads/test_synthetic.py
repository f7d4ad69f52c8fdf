import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from strata_jax.workloads import synthetic


def owners(workload):
  """Which context each request asks about."""
  firsts = {int(context[0]): index for index, context in enumerate(workload.contexts)}
  return [firsts[int(request.prompt_ids[0])] for request in workload.requests]


@pytest.mark.parametrize("order", synthetic.ORDERS)
def test_loogle_like_has_the_published_shape(order):
  workload = synthetic.documents(synthetic.LOOGLE, order=order)
  assert (len(workload.contexts), len(workload.requests)) == (105, 2410)
  assert workload.input_tokens / 2410 == pytest.approx(21_613, rel=0.01)
  assert workload.output_tokens / 2410 == pytest.approx(15.6, rel=0.001)
  # The ceiling of the hit rate that the paper gives: all but the first use of each context.
  distinct = sum(len(context) for context in workload.contexts)
  questions = workload.input_tokens - sum(
    len(workload.contexts[index]) for index in owners(workload)
  )
  assert 1 - (distinct + questions) / workload.input_tokens == pytest.approx(0.956, abs=0.005)


def test_the_orders_differ_in_nothing_but_the_order():
  distance = {}
  for order in synthetic.ORDERS:
    who = owners(synthetic.documents(synthetic.LOOGLE, order=order))
    assert np.bincount(who).tolist() == np.bincount(np.arange(2410) % 105).tolist()
    last: dict[int, int] = {}
    gaps = []
    for position, index in enumerate(who):
      if index in last:
        gaps.append(position - last[index])
      last[index] = position
    distance[order] = (min(gaps), max(gaps))
  assert distance["adjacent"] == (1, 1)
  assert distance["spread"] == (105, 105)
  assert distance["shuffled"][0] == 1
  assert distance["shuffled"][1] > 105


@pytest.mark.parametrize(
  ("name", "requests", "mean_input", "mean_output", "tolerance"),
  [
    ("narrativeqa_like", 1461, 54_797, 13.0, 0.01),
    ("reviewmt_like", 1092, 17_708, 208.3, 0.02),
    ("sharegpt_like", 2000, 681, 261, 0.02),
  ],
)
def test_published_means(name, requests, mean_input, mean_output, tolerance):
  workload = synthetic.GENERATORS[name](0)
  assert len(workload.requests) == requests
  assert workload.input_tokens / requests == pytest.approx(mean_input, rel=tolerance)
  assert workload.output_tokens / requests == pytest.approx(mean_output, rel=0.001)


@pytest.mark.parametrize("shape", [synthetic.REVIEWMT, synthetic.SHAREGPT], ids=lambda s: s.name)
def test_a_turn_repeats_all_that_was_said(shape):
  requests = synthetic.conversations(shape, seed=3).requests
  followers = [request for request in requests if request.follows is not None]
  assert len(requests) - len(followers) == shape.conversations
  for request in followers:
    before = requests[request.follows]
    said = np.concatenate([before.prompt_ids, before.forced_output_ids])
    np.testing.assert_array_equal(request.prompt_ids[: len(said)], said)
    assert len(request.prompt_ids) > len(said)
    assert request.think_s == shape.think_s
    assert request.follows < request.request_id


def test_toolagent_like_shares_as_published():
  requests = synthetic.toolagent().requests
  arrivals = [request.arrival_s for request in requests]
  assert arrivals == sorted(arrivals)
  groups: dict[int, list[int]] = {}
  for index, request in enumerate(requests):
    groups.setdefault(int(request.prompt_ids[0]), []).append(index)
  sharing = 0
  for twins in groups.values():
    if len(twins) == 2:
      a, b = (requests[index] for index in twins)
      shared = min(len(a.prompt_ids), len(b.prompt_ids))
      differing = np.flatnonzero(a.prompt_ids[:shared] != b.prompt_ids[:shared])
      assert differing[0] >= 6000
      assert b.arrival_s - a.arrival_s < 1.0
      sharing += 2
  assert sharing / len(requests) == pytest.approx(0.38, abs=0.001)


def test_no_reuse_shares_no_token():
  workload = synthetic.no_reuse(requests=50)
  ids = np.concatenate([request.prompt_ids for request in workload.requests])
  assert len(np.unique(ids)) == len(ids)


@pytest.mark.parametrize("name", sorted(synthetic.GENERATORS))
def test_a_seed_gives_the_same_workload_and_another_seed_another(name):
  def shape(seed):
    return [(len(r.prompt_ids), r.max_new_tokens, r.arrival_s, int(r.prompt_ids[-1]))
            for r in synthetic.GENERATORS[name](seed).requests]  # fmt: skip

  assert shape(0) == shape(0)
  assert shape(0) != shape(1)


def test_an_unknown_order_is_refused():
  with pytest.raises(ValueError, match="expected one of adjacent, shuffled, spread"):
    synthetic.documents(synthetic.LOOGLE, order="sorted")


@hypothesis.given(
  count=st.integers(1, 200), mean=st.floats(1.0, 500.0), variation=st.floats(0.1, 1.0),
  seed=st.integers(0, 1000),
)  # fmt: skip
def test_lengths_keep_their_sum_and_minimum(count, mean, variation, seed):
  drawn = synthetic.lengths(np.random.default_rng(seed), count, mean, variation)
  assert drawn.sum() == max(count, round(mean * count))
  assert drawn.min() >= 1
