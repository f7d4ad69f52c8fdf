import functools
import math
import random

import pytest

from experiments.sweeps import bracketing, throughput
from experiments.sweeps import case as cases
from experiments.sweeps.case import Case, Point

REQUESTS = 2410


def fluid(capacity, idle_s):
  """Mean TTFT of a queue: flat below the capacity, that of a growing queue above it."""

  def ttft_s(rate):
    grown_s = max(0.0, REQUESTS / 2 * (1 / capacity - 1 / rate))
    return idle_s / max(0.02, 1.0 - min(rate / capacity, 0.99)) ** 0.5 + grown_s

  return ttft_s


def noisy(ttft_s, share, seed=0):
  """The same with an error of up to `share` at each rate: it does not rise with the rate."""

  def worse_s(rate):
    return ttft_s(rate) * (1.0 + share * random.Random(f"{seed} {rate!r}").uniform(-1.0, 1.0))

  return worse_s


def searched(monkeypatch, ttft_s, peak, targets, *, requests=REQUESTS, gives_up=True):
  """What is found for each target with how many runs in sum; every point that was tried."""
  tried = {}

  def run(case, rate, give_up_ttft_s=None):
    value = ttft_s(rate)
    given_up = gives_up and value > 1.05 * give_up_ttft_s
    tried[rate] = value
    return Point(
      rate_rps=rate, ttft_mean_s=give_up_ttft_s if given_up else value, given_up=given_up,
      drain_s=0.0, span_s=100.0, lost=0, summary={}, ttft_guess_s=value if given_up else None,
    )  # fmt: skip

  monkeypatch.setattr(cases, "run", run)
  search = throughput._Search(Case(system="strata"), peak, requests)
  found = {target: search.highest(target) for target in sorted(targets, reverse=True)}
  assert search.runs == len(tried), "a rate was run twice"
  return found, search.runs, tried


def check(found, target, tried):
  """The definition: sustained itself, and not so at the next rate above it, within 2 %."""
  assert found.ttft_mean_s <= target
  assert not found.given_up
  above = [rate for rate, value in tried.items() if value > target and rate > found.rate_rps]
  assert min(above) / found.rate_rps <= bracketing.TOLERANCE
  assert found.rate_rps == max(rate for rate, value in tried.items() if value <= target)


@pytest.mark.parametrize("capacity", [8.0, 11.0, 25.0, 43.0, 50.0])
@pytest.mark.parametrize("error", [0.9, 0.97, 1.0, 1.04])
def test_a_queue_takes_few_runs(monkeypatch, capacity, error):
  ttft_s = fluid(capacity, 0.2)
  found, runs, tried = searched(monkeypatch, ttft_s, capacity * error, [5.0])
  check(found[5.0], 5.0, tried)
  assert runs <= (7 if error == 0.9 else 4)
  found, runs, tried = searched(monkeypatch, ttft_s, capacity * error, [1.0, 2.0, 5.0, 10.0])
  for target, point in found.items():
    check(point, target, tried)
  assert runs <= 16


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_noise_changes_the_crossing_and_not_what_a_crossing_is(monkeypatch, share):
  counts = []
  for seed in range(40):
    ttft_s = noisy(fluid(25.0, 0.3), share, seed)
    found, runs, tried = searched(monkeypatch, ttft_s, 24.5, [1.0, 2.0, 5.0, 10.0])
    for target, point in found.items():
      check(point, target, tried)
    counts.append(runs)
  assert sum(counts) / len(counts) <= 16
  assert max(counts) <= 24


@pytest.mark.parametrize("requests", [0, REQUESTS])
@pytest.mark.parametrize("power", [0.3, 1.0, 8.0, 60.0])
@pytest.mark.parametrize("crossing", [2.0, 19.0, 20.5, 55.0])
def test_any_rising_function_is_bracketed(monkeypatch, requests, power, crossing):
  def ttft_s(rate):
    return 5.0 * (rate / crossing) ** power

  found, runs, tried = searched(monkeypatch, ttft_s, 20.0, [5.0], requests=requests)
  check(found[5.0], 5.0, tried)
  assert crossing / bracketing.TOLERANCE <= found[5.0].rate_rps <= crossing
  assert runs <= 16


def test_a_cliff_beside_which_every_prediction_fails_is_halved(monkeypatch):
  # Far below the target up to the crossing, hardly above it from there on, and the other way round.
  def cliff(rate, crossing, low, high):
    return low if rate <= crossing else high

  for low, high in ((1e-6, 5.001), (4.999, 1e6)):
    for crossing in (20.3, 27.0, 60.0):
      ttft_s = functools.partial(cliff, crossing=crossing, low=low, high=high)
      found, runs, tried = searched(monkeypatch, ttft_s, 20.0, [5.0], gives_up=False)
      check(found[5.0], 5.0, tried)
      assert runs <= 22


def test_out_of_reach(monkeypatch):
  found, runs, tried = searched(monkeypatch, lambda rate: 9.0, 20.0, [5.0])
  assert found[5.0] is None
  assert min(tried) == pytest.approx(20.0 / 64)
  assert runs < 15
  found, runs, tried = searched(monkeypatch, lambda rate: 1.0, 20.0, [5.0])
  assert found[5.0].rate_rps == max(tried) == 80.0
  assert runs < 15


def test_targets_in_any_order(monkeypatch):
  # A run that was given up for a small target says nothing about a larger one.
  tried = {}

  def run(case, rate, give_up_ttft_s=None):
    given_up = rate / 10 > give_up_ttft_s
    tried[rate] = rate / 10
    return Point(
      rate_rps=rate, ttft_mean_s=min(rate / 10, give_up_ttft_s), given_up=given_up, drain_s=0.0,
      span_s=100.0, lost=0, summary={},
    )  # fmt: skip

  monkeypatch.setattr(cases, "run", run)
  search = throughput._Search(Case(system="strata"), 20.0, REQUESTS)
  for target in (1.0, 2.0, 3.0):
    found = search.highest(target)
    assert not found.given_up
    assert found.ttft_mean_s == tried[found.rate_rps] <= target
    assert 10.0 * target / bracketing.TOLERANCE <= found.rate_rps <= 10.0 * target


def test_excess_agrees_with_being_sustained():
  def point(**fields):
    return Point(**{
      "rate_rps": 1.0, "ttft_mean_s": 1.0, "given_up": False, "drain_s": 0.0, "span_s": 100.0,
      "lost": 0, "summary": {}, **fields,
    })  # fmt: skip

  assert point(ttft_mean_s=2.5).excess(5.0) == pytest.approx(-math.log(2.0))
  assert point(ttft_mean_s=10.0).excess(5.0) == pytest.approx(math.log(2.0))
  assert point(drain_s=30.0).excess(5.0) == pytest.approx(math.log(2.0))
  assert point(drain_s=30.0).excess(0.1) > math.log(2.0)
  assert point(lost=1).excess(5.0) == math.inf
  assert point(ttft_mean_s=0.0).excess(5.0) < -10.0
  given_up = point(ttft_mean_s=5.0, given_up=True)
  assert 0.0 < given_up.excess(5.0) < 1e-6
  assert point(ttft_mean_s=5.0, given_up=True, ttft_guess_s=20.0).excess(5.0) == pytest.approx(
    math.log(4.0)
  )


def test_a_run_that_is_given_up_says_about_what_it_would_have_been():
  case = Case(system="hicache_paper", workload="no_reuse", initial_cache="cold", limit=200)
  whole = cases.run(case, 20.0)
  cut = cases.run(case, 20.0, give_up_ttft_s=0.3 * whole.ttft_mean_s)
  assert cut.given_up
  assert cut.ttft_guess_s == pytest.approx(whole.ttft_mean_s, rel=0.25)
