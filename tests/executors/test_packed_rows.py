import jax
import numpy as np
import pytest

from strata_jax.executors import packed_rows


def filled(rows, tokens, pages):
  packed = packed_rows.PackedRows(rows, tokens, pages)
  rng = np.random.default_rng(rows)
  values = {
    "token_ids": rng.integers(0, 2**31, (rows, tokens), np.int32),
    "table": rng.integers(0, 2**31, (rows, pages), np.int32),
    "starts": rng.integers(0, 2**31, rows, np.int32),
    "lengths": rng.integers(0, 2**31, rows, np.int32),
    "temperatures": rng.random(rows, np.float32),
    "seeds": rng.integers(0, 2**32, rows, np.uint32),
    "indices": rng.integers(0, 2**31, rows, np.int32),
  }
  for name, value in values.items():
    getattr(packed, name)[:] = value
  return packed, values


@pytest.mark.parametrize(("rows", "tokens", "pages"), [(1, 1, 1), (3, 1, 7), (2, 32, 5)])
def test_rows_come_to_the_device_as_they_were_filled_in(rows, tokens, pages):
  packed, values = filled(rows, tokens, pages)
  with jax.transfer_guard("disallow"):
    batch, draws = packed.put(jax.devices()[0])
  found = {**batch._asdict(), **draws._asdict()}
  assert found.keys() == values.keys()
  for name, value in values.items():
    assert found[name].dtype == value.dtype
    assert found[name].committed  # as all that the programs were compiled for
    np.testing.assert_array_equal(found[name], value)


def test_rows_are_zero_at_first():
  batch, draws = packed_rows.PackedRows(2, 3, 4).put(jax.devices()[0])
  assert batch.token_ids.shape == (2, 3)
  assert batch.table.shape == (2, 4)
  for array in (*batch, *draws):
    assert not np.asarray(array).any()


def test_the_next_decode_step_stands_one_token_further():
  packed, values = filled(3, 1, 7)
  batch, draws = packed.put(jax.devices()[0])
  sampled = jax.device_put(np.array([[5], [6], [7]], np.int32), jax.devices()[0])
  with jax.transfer_guard("disallow"):
    later, later_draws = packed_rows.advance(batch, draws, sampled)
  assert later.token_ids is sampled
  assert (later.table, later.lengths) == (batch.table, batch.lengths)
  assert (later_draws.temperatures, later_draws.seeds) == (draws.temperatures, draws.seeds)
  np.testing.assert_array_equal(later.starts, values["starts"] + 1)
  np.testing.assert_array_equal(later_draws.indices, values["indices"] + 1)
