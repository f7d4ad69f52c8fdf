import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jax.scheduler import load_or_compute as stage
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import schedule
from strata_jax.scheduler.round import Round
from strata_jax.scheduler.views import Costs
from tests.scheduler.build import budgets, prefills, view, waits

PATH = ((1, 320, "device"), (2, 160, "host"), (3, 480, "host"), (4, 64, "in_queue"))


def _choose(function, *path, shared=(), costs=Costs(), **config):
  one = view(waits(0, *path, tail=7), costs=costs, budgets=budgets(page_size=16, step_tokens=4096))
  round_ = Round(one, SchedulerConfig(**config))
  round_.loads.update(shared)
  return function(round_, round_.candidate(0))


def test_all():
  assert _choose(stage.load_all, *PATH) == (((2, 160), (3, 480)), 960)


def test_what_the_batch_loads_is_there():
  assert _choose(stage.load_all, *PATH, shared={2: 160}) == (((3, 480),), 960)
  assert _choose(stage.load_all, *PATH, shared={2: 160, 3: 480}) == ((), 960)
  assert _choose(stage.load_all, *PATH, shared={2: 160, 3: 96}) == ((), 320 + 160 + 96)


def test_short_hits_are_not_loaded():
  assert _choose(stage.load_all, *PATH, min_load_tokens=640)[1] == 960
  assert _choose(stage.load_all, *PATH, min_load_tokens=641) == ((), 320)
  assert _choose(stage.load_all, *PATH, min_load_tokens=481, shared={2: 160}) == ((), 480)


def test_none():
  assert _choose(stage.load_none, *PATH) == ((), 320)
  assert _choose(stage.load_none, *PATH, shared={2: 160}) == ((), 480)


@pytest.mark.parametrize(("load_s", "start"), [(1.0, 960), (0.9, 960), (1.1, 320)])
def test_cheaper_is_all_or_nothing(load_s, start):
  costs = Costs(load_s_per_token=load_s, compute_s_per_token=1.0)
  assert _choose(stage.load_cheaper, *PATH, costs=costs)[1] == start


def test_cheaper_counts_latency_and_attention():
  slow = Costs(load_s_per_token=0.5, load_latency_s=400, compute_s_per_token=1.0)
  assert _choose(stage.load_cheaper, *PATH, costs=slow)[1] == 320
  attention = dataclasses.replace(slow, compute_s_per_token_context=1.0)
  assert _choose(stage.load_cheaper, *PATH, costs=attention)[1] == 960


@pytest.mark.parametrize("function", [stage.load_cheaper, stage.load_split])
@pytest.mark.parametrize("known", ["", "load_s_per_token", "compute_s_per_token"])
def test_unknown_costs_load_all(function, known):
  costs = Costs(**({known: 1.0} if known else {}))
  assert _choose(function, *PATH, costs=costs) == (((2, 160), (3, 480)), 960)


def test_split_in_the_middle_of_a_node():
  costs = Costs(load_s_per_token=1.0, compute_s_per_token=1.0)
  loads, start = _choose(stage.load_split, *PATH, costs=costs)
  # 711 tokens beyond the device hit: half of them loaded, in whole pages.
  assert (loads, start) == (((2, 160), (3, 192)), 320 + 352)


@given(
  host=st.integers(1, 40),
  tail=st.integers(1, 200),
  load_us=st.floats(0.1, 10),
  compute_us=st.floats(0.1, 10),
  latency_us=st.floats(0, 200),
  attention=st.floats(0, 0.01),
  layerwise=st.booleans(),
)
def test_split_is_the_best_of_all_splits(
  host, tail, load_us, compute_us, latency_us, attention, layerwise
):
  costs = Costs(
    load_s_per_token=load_us, load_latency_s=latency_us, compute_s_per_token=compute_us,
    compute_s_per_token_context=attention,
  )  # fmt: skip
  one = view(
    waits(0, (1, 16 * host, "host"), tail=tail), costs=costs, budgets=budgets(page_size=16)
  )
  round_ = Round(one, SchedulerConfig(layerwise=layerwise))
  prompt = 16 * host + tail

  def seconds(start):
    load_s = start * load_us + (latency_us if start else 0)
    parts = (load_s, round_.compute_s(start, prompt))
    return max(parts) if layerwise else sum(parts)

  _, start = stage.load_split(round_, round_.candidate(0))
  best = min(seconds(16 * pages) for pages in range(host + 1))
  assert seconds(start) <= best * (1 + 1e-9)


def test_split_recomputes_no_more_than_this_step_has_room_for():
  costs = Costs(load_s_per_token=100.0, compute_s_per_token=1.0)
  one = view(
    waits(0, (1, 1_024, "host"), tail=16), costs=costs,
    budgets=budgets(page_size=16, step_tokens=144),
  )  # fmt: skip
  plan = schedule(one, SchedulerConfig(load_or_compute="split"))
  assert plan.prefill == ((0, ((1, 896),), 896, 1_040),)


def test_every_chunk_chooses_anew():
  running = prefills(0, 512, (1, 256, "host"), (2, 64, "in_flight"), tail=3)
  plan = schedule(view(running=(running,)), SchedulerConfig(load_or_compute="compute"))
  assert plan.prefill == ((0, (), 512, 512 + 256 + 64 + 3),)
  plan = schedule(view(running=(running,)), SchedulerConfig())
  assert plan.prefill == ((0, ((1, 256),), 768, 835),)
