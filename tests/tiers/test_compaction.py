"""The choice of segments to merge."""

from hypothesis import given
from hypothesis import strategies as st

from strata_jax.tiers.compaction import Candidate, choose


def candidate(name: str, pages: int, live_pages: int, used_s: float = 0.0) -> Candidate:
  return Candidate(name, pages, live_pages, used_s)


def test_full_segments_stay():
  full = [candidate(f"s{i}", 100, 100 - i) for i in range(10)]
  assert choose(full, 100) == []


def test_a_segment_without_live_pages_goes():
  assert choose([candidate("empty", 100, 0)], 100) == ["empty"]


def test_a_hollow_segment_is_written_anew_when_half_comes_back():
  assert choose([candidate("hollow", 100, 50)], 100) == ["hollow"]
  assert choose([candidate("small", 20, 15)], 100) == []


def test_small_segments_are_merged_by_four():
  small = [candidate(f"s{i}", 10, 10) for i in range(4)]
  assert choose(small[:3], 100) == []
  assert sorted(choose(small, 100)) == ["s0", "s1", "s2", "s3"]
  assert sorted(choose(small[:2], 100, force=True)) == ["s0", "s1"]


def test_the_least_recently_used_are_merged_together():
  small = [candidate(f"s{i}", 30, 30, used_s=float(10 - i)) for i in range(8)]
  assert choose(small, 120) == ["s7", "s6", "s5", "s4"]


@given(
  st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50), st.integers(0, 5)), max_size=20),
  st.integers(1, 60),
  st.booleans(),
)
def test_the_chosen_fit_one_segment_and_forcing_ends(segments, batch_pages, force):
  candidates = {
    f"s{i}": candidate(f"s{i}", pages, min(live, pages), float(used))
    for i, (pages, live, used) in enumerate(segments)
    if min(live, pages) <= batch_pages
  }
  rounds = 0
  while names := choose(candidates.values(), batch_pages, force=force):
    chosen = [candidates.pop(name) for name in names]
    live = sum(c.live_pages for c in chosen)
    assert live <= batch_pages
    if live:
      merged = f"m{rounds}"
      candidates[merged] = candidate(merged, live, live, max(c.used_s for c in chosen))
    rounds += 1
    assert rounds <= 2 * len(segments) + 1
