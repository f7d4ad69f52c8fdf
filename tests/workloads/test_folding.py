import dataclasses

import numpy as np
import pytest

from strata_jax.workloads import folding, synthetic

_SHAPE = dataclasses.replace(
  synthetic.LOOGLE, contexts=4, queries=12, mean_input_tokens=200, mean_output_tokens=3
)


def test_ids_are_in_the_vocabulary_and_spread_over_it():
  ids = folding.fold_ids(np.arange(20_000, dtype=np.int32), 128)
  assert ids.dtype == np.int32
  counts = np.bincount(ids, minlength=128)
  assert len(counts) == 128
  assert counts.min() > 100  # 156 each, were they even


def test_streams_differ_and_repeat():
  ids = np.arange(1000, dtype=np.int32)
  one, two = folding.fold_ids(ids, 50_000, 1), folding.fold_ids(ids, 50_000, 2)
  assert np.mean(one == two) < 0.01
  np.testing.assert_array_equal(one, folding.fold_ids(ids, 50_000, 1))


@pytest.mark.parametrize("vocab_size", [128, 128_256])
def test_contexts_stay_shared_and_distinct_and_tails_are_new_in_every_stream(vocab_size):
  plain = synthetic.documents(_SHAPE, seed=3)
  first = folding.fold(plain, vocab_size, tail_stream=1)
  second = folding.fold(plain, vocab_size, tail_stream=2)
  starts = {context[:32].tobytes() for context in first.contexts}
  assert len(starts) == 4
  for a, b, was in zip(first.requests, second.requests, plain.requests, strict=True):
    (context,) = [c for c in first.contexts if np.array_equal(a.prompt_ids[: len(c)], c)]
    np.testing.assert_array_equal(b.prompt_ids[: len(context)], context)
    assert len(a.prompt_ids) == len(b.prompt_ids) == len(was.prompt_ids)
    assert not np.array_equal(a.prompt_ids[len(context) :], b.prompt_ids[len(context) :])
    assert a.max_new_tokens == len(was.forced_output_ids)
    assert a.forced_output_ids is None
    assert a.stop_token_ids == ()


def test_turns_of_a_conversation_still_begin_with_what_was_said():
  shape = dataclasses.replace(synthetic.SHAREGPT, conversations=5, requests=15)
  found = folding.fold(synthetic.conversations(shape), 1000)
  for request in found.requests:
    if request.follows is not None:
      before = found.requests[request.follows].prompt_ids
      np.testing.assert_array_equal(request.prompt_ids[: len(before)], before)
