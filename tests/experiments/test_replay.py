import json
import subprocess
import sys

import pytest

from experiments import decisions, flags, replay
from strata_jax import recording, testing
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import policy_config, schedule
from strata_jax.scheduler.views import StepPlan
from tests.scheduler.build import view, waits

MINE = """
from strata_jax.scheduler.policies import schedule as usual


def schedule(view, config):
  return usual(view, config) if view.version != 7 else usual(view, config).__class__(version=7)
"""


@pytest.fixture
def record(tmp_path):
  """Twenty decisions of Strata's under twins."""
  path = tmp_path / "run.jsonl.gz"
  config = SchedulerConfig()
  with recording.Recorder(path, policy="strata", config=config) as recorder:

    def policy(one):
      plan = schedule(one, config)
      if one.version < 20:
        recorder(one, plan)
      return plan

    testing.run_scenario(testing.SCENARIOS[1], policy, config=config)
  return path


def _run(tmp_path, capsys, *argv: str) -> dict:
  args = replay.FLAGS.parse([f"--out={tmp_path / 'out'}", *argv])
  replay.main(args)
  summary = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
  return summary


def test_the_same_policy_decides_the_same(tmp_path, capsys, record):
  summary = _run(tmp_path, capsys, f"--record={record}")
  assert (summary["decisions"], summary["different"]) == (20, 0)
  assert summary["identical"]
  assert summary["first_difference"] is None


def test_another_policy_differs(tmp_path, capsys, record):
  summary = _run(tmp_path, capsys, f"--record={record}", "--policy=fcfs")
  assert 0 < summary["different"] <= 20
  assert summary["first_difference"]["decision"] == 0
  assert set(summary["differences_by_field"]) >= {"deferred", "prefill"}
  rows = (tmp_path / "out" / "differences.jsonl").read_text().splitlines()
  assert len(rows) == summary["different"]


def test_another_config_differs_as_the_policy_without_it(tmp_path, capsys, record):
  off = _run(tmp_path, capsys, f"--record={record}", "--deferral=off")
  fcfs = _run(tmp_path, capsys, f"--record={record}", "--policy=fcfs")
  assert off["different"] == fcfs["different"]


def test_a_policy_of_ones_own(tmp_path, capsys, record):
  path = tmp_path / "mine.py"
  path.write_text(MINE)
  summary = _run(tmp_path, capsys, f"--record={record}", f"--policy={path}:schedule")
  assert summary["different"] == 1
  assert summary["first_difference"]["view"]["version"] == 7


@pytest.mark.parametrize("argv", [[], ["--record=nowhere"], ["--record={record}", "--policy=x"]])
def test_usage_errors(tmp_path, record, argv):
  argv = [arg.format(record=record) for arg in argv]
  with pytest.raises(flags.UsageError):
    replay.main(replay.FLAGS.parse([f"--out={tmp_path / 'out'}", *argv]))


def test_as_a_program(tmp_path, record):
  argv = [sys.executable, "-m", "experiments.replay", f"--record={record}", f"--out={tmp_path}/o"]
  done = subprocess.run(argv, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout.splitlines()[-1])["decisions"] == 20
  done = subprocess.run([*argv, "--speed=9"], capture_output=True, text=True, check=False)
  assert (done.returncode, done.stdout) == (2, "")


def test_differences_of_two_plans():
  twins = view(waits(0, (1, 500, "in_queue")), waits(1, (1, 500, "in_queue")))
  first, second = schedule(twins, SchedulerConfig()), schedule(twins, policy_config("fcfs"))
  found = decisions.differences(first, second)
  assert found["deferred"] == {"first": [(1, "claimed", (1,))], "second": []}
  assert found["prefill"] == {"first": [], "second": [(1, (), 0, 501)]}
  assert decisions.differences(first, first) == {}
  one, other = (
    StepPlan(version=1, decode=(1, 2)),
    StepPlan(version=1, decode=(2, 1), decode_steps=2),
  )
  assert decisions.differences(one, other) == {
    "decode": {"first": [1, 2], "second": [2, 1]},
    "decode_steps": {"first": 1, "second": 2},
  }
