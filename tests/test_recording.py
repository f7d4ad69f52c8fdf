import dataclasses
import json
import math

import pytest

from strata_jax import recording, testing
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import make_policy
from strata_jax.scheduler.views import (
  Costs,
  Deferred,
  Load,
  ParkedView,
  PrefetchView,
  Prefill,
  Producer,
  Refused,
  StepPlan,
)
from tests.scheduler import golden_cases
from tests.scheduler.build import decodes, prefills, view, waits

FULL_VIEW = view(
  waits(
    3, (1, 64, "device", True), (2, 16, "storage"), tail=2, output_reserve_tokens=5,
    computed_tokens=7, deferrals=1, postponements=2, bypasses=3,
    prefetch=PrefetchView(16, 32, None), tenant="a", front=True, after=(1, 2),
  ),
  version=12,
  running=(decodes(1, tenant="b"), prefills(2, 16, (4, 16, "in_flight"))),
  parked=ParkedView((5, 6), 100, 7),
  in_flight={4: Producer(2, 17)},
  loading={9: 32},
  costs=Costs(load_s_per_token=0.1 + 0.2, compute_s_per_token=1e-300),
  evictable_pages=5,
  now_s=1 / 3,
)  # fmt: skip
FULL_PLAN = StepPlan(
  version=12,
  prefill=(Prefill(3, (Load(2, 16),), 80, 82),),
  park=(3,),
  resume=(5, 6),
  decode=(1,),
  decode_steps=4,
  preempt=(2,),
  cancel_prefetch=(3,),
  deferred=(Deferred(8, "claimed", (1, 2)),),
  postponed=(9,),
  bypassed=(10,),
  bundled=(3,),
  refused=(Refused(11, "needs 5 device pages of 4"),),
  wake_at_s=0.1,
)  # fmt: skip


@pytest.mark.parametrize("name", ["record.jsonl", "deep/record.jsonl.gz"])
def test_exact_round_trip(tmp_path, name):
  config = SchedulerConfig(max_bypasses=math.inf, ratio_threshold="profiled")
  decisions = [(FULL_VIEW, FULL_PLAN), (view(), StepPlan(version=1))]
  with recording.Recorder(tmp_path / name, policy="mine", config=config, seed=3) as recorder:
    for decision in decisions:
      recorder(*decision)
  record = recording.read_record(tmp_path / name)
  assert (record.policy, record.config, record.about) == ("mine", config, {"seed": 3})
  read = list(record.decisions())
  assert read == decisions
  assert repr(read) == repr(decisions)  # types too: 1 is not 1.0, a tuple no list
  assert list(record.decisions()) == decisions


def test_every_field_of_the_full_examples_differs_from_its_default():
  for value in (FULL_VIEW, FULL_PLAN, FULL_VIEW.waiting[0]):
    for field in dataclasses.fields(value):
      assert getattr(value, field.name) != field.default, field.name


def test_views_of_a_run_come_back(tmp_path):
  seen = []
  policy = make_policy("strata")

  def watched(one):
    seen.append((one, policy(one)))
    return seen[-1][1]

  testing.run_scenario(dataclasses.replace(testing.SCENARIOS[1], rounds=20), watched)
  with recording.Recorder(tmp_path / "r", policy="", config=SchedulerConfig()) as recorder:
    for decision in seen:
      recorder(*decision)
  assert list(recording.read_record(tmp_path / "r").decisions()) == seen


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", "1: expected the header"),
    ("[]\n", "1: expected the header"),
    ("not json\n", "1: expected the header"),
    ('{"format": "strata_jax_decisions", "version": 2}\n', "1: expected version 1, got 2"),
    ('{"format": "strata_jax_decisions", "version": 1}\n', "1: expected a scheduler config"),
    (
      '{"format": "strata_jax_decisions", "version": 1, "scheduler": {"speed": 1}}\n',
      "1: expected a scheduler config.*speed",
    ),
  ],
)
def test_what_is_no_record(tmp_path, text, message):
  path = tmp_path / "r.jsonl"
  path.write_text(text)
  with pytest.raises(recording.RecordError, match=message):
    recording.read_record(path)


def test_a_cut_line_is_named(tmp_path):
  path = tmp_path / "r.jsonl"
  with recording.Recorder(path, policy="", config=SchedulerConfig()) as recorder:
    recorder(FULL_VIEW, FULL_PLAN)
  path.write_text(path.read_text()[:-30])
  with pytest.raises(recording.RecordError, match=r"r\.jsonl:2: expected a decision"):
    list(recording.read_record(path).decisions())


def test_a_cut_gz_file_is_named(tmp_path):
  path = tmp_path / "r.jsonl.gz"
  with recording.Recorder(path, policy="", config=SchedulerConfig()) as recorder:
    recorder(FULL_VIEW, FULL_PLAN)
  path.write_bytes(path.read_bytes()[:-10])
  with pytest.raises(recording.RecordError, match="cannot be read"):
    list(recording.read_record(path).decisions())


def test_lines_are_small_and_plain():
  _, (one,) = golden_cases.CASES["two_cold_twins"]()
  value = json.loads(json.dumps(recording.view_to_json(one)))
  assert value["waiting"][0] == {
    "request_id": 0, "arrival_s": 0.0, "path": [[1, 4999, "in_queue"]], "tail_tokens": 1,
    "output_reserve_tokens": 0,
  }  # fmt: skip
