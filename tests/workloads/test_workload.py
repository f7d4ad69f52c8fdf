import numpy as np
import pytest

from strata_jax.workloads.request import Request
from strata_jax.workloads.workload import MAX_TOKEN_ID, TokenIds, Workload


def test_token_ids_are_used_once_and_stay_int32():
  ids = TokenIds(first=MAX_TOKEN_ID - 4)
  taken = np.concatenate([ids.take(2), ids.take(3)])
  assert taken.dtype == np.int32
  assert taken.tolist() == list(range(MAX_TOKEN_ID - 4, MAX_TOKEN_ID + 1))
  with pytest.raises(OverflowError, match="int32"):
    ids.take(1)


def test_totals_and_distinct_ids():
  one = Request(request_id=0, prompt_ids=np.arange(3, dtype=np.int32), max_new_tokens=5)
  two = Request(request_id=1, prompt_ids=np.arange(4, dtype=np.int32), max_new_tokens=5,
                forced_output_ids=np.arange(2, dtype=np.int32))  # fmt: skip
  workload = Workload(name="w", requests=(one, two))
  assert (workload.input_tokens, workload.output_tokens) == (7, 7)
  with pytest.raises(ValueError, match="distinct"):
    workload.with_requests((one, one))
