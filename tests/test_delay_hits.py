import numpy as np
import pytest

from strata_jax import delay_hits
from strata_jax.workloads import synthetic
from strata_jax.workloads.request import Request
from strata_jax.workloads.workload import Workload


def workload(*prompts, **fields):
  return Workload(
    name="w",
    requests=tuple(
      Request(request_id=i, prompt_ids=np.array(p, dtype=np.int32), **fields)
      for i, p in enumerate(prompts)
    ),
  )


def run(prompts, arrivals_s, resolve_s_per_token, block_tokens=2):
  found = workload(*prompts)
  blocks, distinct = delay_hits.block_ids(found, block_tokens)
  return delay_hits.simulate(
    blocks, distinct, [len(p) for p in prompts], arrivals_s,
    block_tokens=block_tokens, resolve_s_per_token=resolve_s_per_token,
  )  # fmt: skip


def test_a_block_names_all_that_stands_before_it():
  blocks, distinct = delay_hits.block_ids(workload([1, 2, 3, 4], [3, 4, 3, 4], [1, 2, 3, 9]), 2)
  assert distinct == 5
  assert blocks[0][0] == blocks[2][0]
  assert blocks[0][1] not in blocks[1].tolist()


def test_namespaces_share_nothing():
  plain = workload([1, 2]).requests[0]
  salted = workload([1, 2], salt="a").requests[0]
  both = Workload(name="w", requests=(plain, Request(request_id=1, prompt_ids=salted.prompt_ids,
                                                     salt="a")))  # fmt: skip
  blocks, _ = delay_hits.block_ids(both, 2)
  assert blocks[0][0] != blocks[1][0]


def test_without_resolve_time_all_but_the_last_token_hits():
  prompt = list(range(8))
  assert run([prompt, prompt], [0.0, 0.0], 0.0).hit_tokens == 6  # one token is always computed
  assert run([[*prompt, 8], [*prompt, 9]], [0.0, 0.0], 0.0).hit_tokens == 8


def test_a_block_is_ready_after_the_computed_tokens_times_the_resolve_time():
  prompt = list(range(9))  # 9 tokens computed: ready at 0.9
  early = run([prompt, prompt], [0.0, 0.89], 0.1)
  late = run([prompt, prompt], [0.0, 0.9], 0.1)
  assert (early.hit_tokens, early.delay_hit_tokens) == (0, 8)
  assert (late.hit_tokens, late.delay_hit_tokens) == (8, 0)
  # The third comes while the second computes again: the first's result counts.
  third = run([prompt, prompt, prompt], [0.0, 0.5, 0.95], 0.1)
  assert third.hit_tokens == 8


def test_a_hit_shortens_what_is_computed():
  shared = list(range(8))
  first, second, third = [*shared, 90], [*shared, 91, 92, 93], [*shared, 91, 92, 95]
  # The second computes 3 tokens from 1.0 on: its block [91, 92] is ready at 1.3.
  assert run([first, second, third], [0.0, 1.0, 1.29], 0.1).hit_tokens == 8 + 8
  assert run([first, second, third], [0.0, 1.0, 1.31], 0.1).hit_tokens == 8 + 10


def test_hit_rates_fall_with_resolve_time_and_with_rate():
  found = synthetic.documents(synthetic.LOOGLE)
  blocks, distinct = delay_hits.block_ids(found, 512)
  tokens = [len(r.prompt_ids) for r in found.requests]
  gaps = np.random.default_rng(0).exponential(1.0, len(tokens)).cumsum()

  def rate(rate_rps, resolve_ms):
    return delay_hits.simulate(
      blocks, distinct, tokens, (gaps / rate_rps).tolist(),
      block_tokens=512, resolve_s_per_token=resolve_ms / 1e6,
    ).hit_rate  # fmt: skip

  by_resolve = [rate(10, ms) for ms in (0, 10, 100, 1000)]
  by_rate = [rate(r, 300) for r in (1, 10, 100)]
  assert by_resolve == sorted(by_resolve, reverse=True)
  assert by_rate == sorted(by_rate, reverse=True)
  assert by_resolve[0] > by_resolve[-1]
  # Only the product of rate and resolve time matters.
  assert rate(10, 100) == pytest.approx(rate(100, 10), abs=1e-12)
