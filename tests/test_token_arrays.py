import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jax.token_arrays import as_tokens, common_prefix, keep


@pytest.mark.parametrize(
  "bad", [[1.5, 2.0], [2**31], [[1, 2]], ["a"]], ids=["floats", "too large", "2-d", "text"]
)
def test_wrong_tokens_are_an_error(bad):
  with pytest.raises(ValueError, match="tokens: expected"):
    as_tokens(bad)


@given(st.integers(0, 70_000), st.integers(0, 70_000), st.integers(0, 10))
def test_common_prefix(length, at, more):
  first = np.zeros(length, np.int32)
  second = first.copy()
  second[at : at + more] = 1
  assert common_prefix(first, second) == (min(at, length) if more else length)


def test_int32_arrays_are_taken_as_they_are():
  tokens = np.arange(5, dtype=np.int32)
  assert as_tokens(tokens) is tokens
  assert as_tokens(range(5)).dtype == np.int32


def test_kept_are_copies_unless_nobody_can_change_them():
  tokens = np.arange(100, dtype=np.int32)
  assert keep(tokens) is not tokens
  tokens.flags.writeable = False
  assert keep(tokens) is tokens
  most, few = tokens[:60], tokens[:40]
  assert keep(most) is most
  assert keep(few).base is None  # the rest is not held in memory for it
