"""A folder of `throughput` with points of a policy of one's own, in the programs that read it."""

import dataclasses
import json

import pytest

from experiments import calibrate, flags, sweep, validate, what_if
from strata_jax import simulation as sim
from strata_jax.scheduler.views import Costs
from tests.experiments import simulated_points

MACHINE = sim.find_profile("h200", "llama31_8b")
SHOWN = Costs(load_s_per_token=3e-6, compute_s_per_token=2e-5, decode_step_s=6e-3)
LABEL = "strata@16 with mine.py:last_come_first"
MINE = """
import dataclasses
from strata_jax.scheduler.policies import plan_step, stages_of

def last_come_first(view, config):
  stages = dataclasses.replace(stages_of(config), order=lambda round_, ready: ready[::-1])
  return plan_step(view, config, stages)
"""


@pytest.fixture
def mine(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text(MINE)
  yield file
  sweep.policy_source.cache_clear()


@pytest.fixture
def points(mine, tmp_path):
  shape = dataclasses.replace(simulated_points.SHAPE, queries=60)
  return simulated_points.write(
    tmp_path / "points", MACHINE, ("strata@16",), ("strata@16:40",), shape=shape, shown=SHOWN,
    policy=f"{mine}:last_come_first",
  )  # fmt: skip


def _measured(points):
  lines = (points / "points.jsonl").read_text().splitlines()
  return {row["system"]: row for row in map(json.loads, lines)}


def _validate(out, points):
  validate.main(validate.FLAGS.parse([f"--out={out}", f"--run={points}", "--bound=none"]))
  return json.loads((out / "validation.json").read_text())["points"]


def _what_if(out, points, *argv):
  what_if.main(what_if.FLAGS.parse([f"--out={out}", f"--run={points}", *argv]))
  return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def test_its_points_are_served_again_with_it(points, tmp_path):
  measured = _measured(points)
  assert list(measured) == ["strata@16", LABEL]
  assert len({row["ttft_mean_s"] for row in measured.values()}) == 2
  rows = _validate(tmp_path / "validate", points)
  assert [row["system"] for row in rows] == list(measured)
  assert all(row["error"]["ttft_mean_s"] == 0.0 for row in rows)

  rows = _what_if(tmp_path / "what_if", points)
  assert [(row["system"], row["own_setting"]) for row in rows] == [
    (label, True) for label in measured
  ]
  for row in rows:
    assert row["ttft_mean_s"] == measured[row["system"]]["ttft_mean_s"]


def test_a_policy_that_is_asked_for_stands_behind_the_systems_of_the_run_alone(
  points, mine, tmp_path
):
  rows = _what_if(tmp_path / "out", points, f"--policy={mine}:last_come_first")
  assert [row["system"] for row in rows] == ["strata@16", LABEL]
  assert rows[1]["ttft_mean_s"] == _measured(points)[LABEL]["ttft_mean_s"]


def test_a_bound_has_its_own_policy(points):
  run = validate.MeasuredRun(points)
  found = [
    validate.validation_bound.at_equal_ttft(run, point, MACHINE, "oracle_io", 1.25)
    for point in run.points
  ]
  assert found[0] == found[1]


@pytest.mark.parametrize(
  ("change", "why"),
  [
    (lambda file: file.unlink(), "policy: expected a file, got"),
    (lambda file: file.write_text(MINE + "#"), "last_come_first is not the one that served them"),
  ],
)
def test_without_its_text_its_points_are_left_out_in_one_line(
  points, mine, tmp_path, capsys, change, why
):
  sweep.policy_source.cache_clear()
  change(mine)
  for serve in (_validate, _what_if):
    rows = serve(tmp_path / "out", points)
    assert [row["system"] for row in rows] == ["strata@16"]
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "left out" in one]
    assert line.startswith(f"left out, the points of {LABEL}: ")
    assert why in line
  with pytest.raises(flags.UsageError, match=rf"left out, the points of {LABEL}: "):
    _what_if(tmp_path / "out", points, f"--systems={LABEL}")


def test_a_run_without_any_other_points_is_an_error(points, mine, tmp_path):
  rows = (points / "points.jsonl").read_text().splitlines()
  (points / "points.jsonl").write_text(rows[1] + "\n")
  mine.write_text(MINE + "#")
  sweep.policy_source.cache_clear()
  for serve in (_validate, _what_if):
    with pytest.raises(flags.UsageError, match=rf"left out, the points of {LABEL}: "):
      serve(tmp_path / "out", points)


def test_steps_are_steps_whatever_scheduled_them(points, mine, tmp_path):
  mine.unlink()
  argv = [f"--run={points}", f"--system={LABEL}", "--rate=40", "--name=mine", "--min_steps=5"]
  calibrate.main(calibrate.FLAGS.parse([f"--out={tmp_path / 'out'}", *argv]))
  assert json.loads((tmp_path / "out" / "summary.json").read_text())["points"] == [1]


def test_another_policy_stands_behind_own_ones_where_there_is_nothing_else(points, tmp_path):
  path = points / "points.jsonl"
  own = [line for line in path.read_text().splitlines() if json.loads(line)["system"] == LABEL]
  path.write_text("\n".join(own))
  found = _what_if(tmp_path / "other", points, "--policy=fcfs")
  assert [row["system"] for row in found] == [LABEL, f"{LABEL} with fcfs"]
