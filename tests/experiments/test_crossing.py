import math

import pytest

from experiments.sweeps import crossing

_REST = dict.fromkeys(crossing.KEPT)


def _row(rate, ttft, *, system="a", repeat=0, drain=0.0, lost=0, output=None):
  return {
    **_REST, "system": system, "repeat": repeat, "rate_rps": rate, "ttft_mean_s": ttft,
    "drain_s": drain, "arrival_span_s": 100.0, "lost": lost,
    "output_tokens_per_s": 10 * rate if output is None else output,
  }  # fmt: skip


def test_a_crossing_is_interpolated_in_the_logarithm_of_the_ttft():
  # TTFT = exp(rate): between 4 and 5 the crossing of exp(4.25) is at 4.25.
  rows = [_row(rate, math.exp(rate)) for rate in (5, 3, 4)]
  found = crossing.find(rows, math.exp(4.25))
  assert found.rate_rps == pytest.approx(4.25)
  assert found.values["output_tokens_per_s"] == pytest.approx(42.5)
  assert found.bracket_rps == (4, 5)
  assert found.interpolated
  assert found.reason == ""


def test_what_cannot_be_said_has_a_reason():
  rows = [_row(4, 1.0), _row(5, 3.0)]
  assert crossing.find(rows, 0.5).rate_rps is None
  assert crossing.find(rows, 0.5).reason == (
    "not sustained at 4 requests/s, the lowest rate; add a lower one to --rates, or a:auto:4 with "
    "this target in --targets"
  )
  assert crossing.find(rows, 3.5).reason == (
    "sustained at 5 requests/s, the highest rate; add a higher one to --rates, or a:auto:5 with "
    "this target in --targets"
  )


def test_a_point_is_sustained_only_if_it_drains_and_loses_nobody():
  # 3 T* = 6 s; 5 % of the span are 5 s.
  late = [_row(4, 1.0, drain=5.9), _row(5, 1.5, drain=6.1), _row(6, 9.0)]
  found = crossing.find(late, 2.0)
  assert (found.rate_rps, found.interpolated) == (4, False)
  assert found.reason == "taken at the lower rate: 5 requests/s did not drain in time"
  assert crossing.find([_row(4, 1.0, drain=4.9), _row(5, 9.0)], 1.1).interpolated
  cut = [_row(4, 1.0), _row(5, 2.5, lost=3)]
  assert crossing.find(cut, 2.0).reason == "taken at the lower rate: 5 requests/s lost requests"
  assert crossing.find([_row(4, 1.0, lost=1)], 2.0).rate_rps is None


def test_a_point_without_any_first_token_is_not_sustained():
  assert crossing.find([_row(4, 1.0), _row(5, None, lost=9)], 2.0).rate_rps == 4


def test_the_table_pairs_repeats():
  points = []
  for repeat, factor in ((0, 2.0), (1, 4.0)):
    for system, speed in (("hicache_paper", 1.0), ("strata@16", factor), ("other", 1.5)):
      for rate, ttft in ((4, 1.0), (5, 4.0)):
        points.append(_row(rate * speed, ttft, system=system, repeat=repeat))
  rows = crossing.table(points, {5.0: 2.0}, "hicache_paper")
  by_name = {row["system"]: row for row in rows}
  base, strata = by_name["hicache_paper"], by_name["strata@16"]
  assert base["rate_rps"] == pytest.approx(4.5)  # ln 2 is half of ln 4
  assert base["ratio_to_baseline"] == 1.0
  assert (strata["ratio_min"], strata["ratio_to_baseline"], strata["ratio_max"]) == (2, 3, 4)
  assert strata["best_baseline"] == "other"
  assert strata["ratio_to_best_baseline"] == pytest.approx(2.0)
  assert strata["output_tokens_per_s"] == pytest.approx(135.0)
  assert strata["mean_ttft_s"] == 2.0
  assert strata["repeats"] == 2
  assert base["bracket"] == [4, 5]
  assert base["bracket_is_close"] is True


def test_wide_brackets_are_told_and_missing_ones_leave_no_ratio():
  points = [_row(4, 1.0), _row(6, 4.0), _row(9, 1.0, system="b")]
  first, second = crossing.table(points, {5.0: 2.0}, "b")
  assert first["widest_bracket"] == 1.5
  assert first["bracket_is_close"] is False
  assert first["ratio_to_baseline"] is None
  assert second["output_tokens_per_s"] is None
  assert second["sustained"] is False
  assert second["reason"] == (
    "repeat 0: sustained at 9 requests/s, the highest rate; add a higher one to --rates, or "
    "b:auto:9 with this target in --targets"
  )
