import pytest

from experiments.sweeps import rate_search
from experiments.sweeps.crossing import BRACKET


def _row(rate, ttft, lost=0):
  return {
    "rate_rps": rate, "ttft_mean_s": ttft, "drain_s": 0.0, "arrival_span_s": 10.0, "lost": lost
  }  # fmt: skip


@pytest.mark.parametrize("start", [0.5, 4.0, 9.0, 10.0, 11.0, 100.0])
def test_a_search_ends_with_two_close_rates_around_the_target(start):
  rows = []
  while (rate := rate_search.next_rate(rows, start, 1.0)) is not None:
    rows.append(_row(rate, (rate / 10.0) ** 8))  # reaches the target at 10
  low = max(row["rate_rps"] for row in rows if row["ttft_mean_s"] <= 1.0)
  high = min(row["rate_rps"] for row in rows if row["ttft_mean_s"] > 1.0)
  assert high / low <= BRACKET * 1.01
  assert len(rows) <= 10


def test_steps_are_longer_far_from_the_target():
  assert rate_search.next_rate([], 8.0, 1.0) == 8.0
  assert rate_search.next_rate([_row(8.0, 0.9)], 8.0, 1.0) == 10.0
  assert rate_search.next_rate([_row(8.0, 0.1)], 8.0, 1.0) == 12.5
  assert rate_search.next_rate([_row(8.0, 1.1)], 8.0, 1.0) == 6.4
  assert rate_search.next_rate([_row(8.0, 9.0)], 8.0, 1.0) == 5.12
  assert rate_search.next_rate([_row(8.0, 0.1, lost=1)], 8.0, 1.0) == 5.12
  assert rate_search.next_rate([_row(8.0, None)], 8.0, 1.0) == 5.12
  assert rate_search.next_rate([_row(8.0, 0.1), _row(12.5, 3.0)], 8.0, 1.0) == 10.0


def test_a_search_gives_up_far_from_its_guess():
  assert rate_search.next_rate([_row(60.0, 0.5)], 1.0, 1.0, largest=64.0) is None
  assert rate_search.next_rate([_row(0.016, 2.0)], 1.0, 1.0, largest=64.0) is None
