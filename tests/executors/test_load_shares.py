import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strata_jax.executors import load_shares
from tests.executors.driver import Driver


def loads_of(sizes, rng):
  host, device = rng.permutation(1000), rng.permutation(1000)
  ends = np.cumsum(sizes)
  drive = Driver(None, 4)
  return [
    drive.load_work(host[end - size : end], device[end - size : end])
    for size, end in zip(sizes, ends, strict=True)
  ]


@given(
  sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
  weights=st.lists(st.integers(1, 500), min_size=1, max_size=5),
  largest=st.integers(1, 60),
  seed=st.integers(0, 99),
)
def test_every_page_is_in_one_share(sizes, weights, largest, seed):
  loads = loads_of(sizes, np.random.default_rng(seed))
  shares = load_shares.cut(loads, weights, largest)
  assert len(shares) == len(weights) + 1
  assert all(len(share.host_slots) <= largest for share in shares[:-1])
  pairs = [pair for share in shares for pair in zip(*share, strict=True)]
  want = [pair for load in loads for pair in zip(load.host_slots, load.device_slots, strict=True)]
  assert sorted(pairs) == sorted(want)
  for share in shares:
    assert (np.diff(share.host_slots) > 0).all()


def test_shares_follow_the_weights():
  (load,) = loads_of([100], np.random.default_rng(0))
  sizes = lambda *args: [len(share.host_slots) for share in load_shares.cut([load], *args)]
  assert sizes([512, 512, 32, 1], 100) == [48, 48, 3, 1, 0]
  assert sizes([1, 1], 30) == [30, 30, 40]


def test_spread_over_decode_steps():
  drive = Driver(None, 4)
  works = [
    drive.load_work([5, 3, 9, 1], [0, 1, 2, 3], transfer_id=7),
    drive.load_work([2], [4], transfer_id=8),
  ]
  parts = load_shares.spread(works, 3)
  assert [[work.transfer_id for work in part] for part in parts] == [[7, 8]] * 3
  assert [[work.host_slots.tolist() for work in part] for part in parts] == [
    [[5, 3], [2]], [[9], []], [[1], []],
  ]  # fmt: skip
  assert [[work.device_slots.tolist() for work in part] for part in parts] == [
    [[0, 1], [4]], [[2], []], [[3], []],
  ]  # fmt: skip
  assert load_shares.spread([], 2) == [(), ()]
