import sys

import pytest

from strata_jax import testing
from strata_jax.policy_loading import load_policy
from strata_jax.scheduler.config import SchedulerConfig
from tests.scheduler.build import admitted, view, waits

MINE = """
import dataclasses

from strata_jax.scheduler.policies import plan_step, stages_of


@dataclasses.dataclass
class Weights:
  prompt: int = 1


def shortest_prompt(round_, ready):
  return sorted(ready, key=lambda i: Weights().prompt * round_.candidate(i).prompt_tokens)


def schedule(view, config):
  stages = dataclasses.replace(stages_of(config), order=shortest_prompt)
  return plan_step(view, config, stages)


NUMBER = 3


def no_config(view):
  return None
"""
WAITING = (waits(0, tail=30), waits(1, tail=10), waits(2, tail=20))


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(MINE)
  return path


def test_from_a_file(file):
  policy = load_policy(f"{file}:schedule")
  assert admitted(policy(view(*WAITING))) == [1, 2, 0]
  testing.check_policy(f"{file}:schedule")


def test_from_a_module(file, monkeypatch):
  monkeypatch.syspath_prepend(file.parent)
  assert admitted(load_policy("mine:schedule")(view(*WAITING))) == [1, 2, 0]
  sys.modules.pop("mine")


def test_config_is_bound(file):
  twins = [waits(i, (1, 500, "in_queue")) for i in range(2)]
  for spec in (f"{file}:schedule", "strata"):
    for deferral, expected in ((True, [0]), (False, [0, 1])):
      policy = load_policy(spec, SchedulerConfig(deferral=deferral))
      assert admitted(policy(view(*twins))) == expected


def test_by_name():
  assert admitted(load_policy("fcfs")(view(*WAITING))) == [0, 1, 2]


@pytest.mark.parametrize(
  ("spec", "message"),
  [
    ("fastest", "expected one of fcfs, .* got 'fastest'"),
    ("{file}", "expected one of fcfs"),
    ("{file}:", "expected FILE.py:NAME"),
    (":schedule", "expected FILE.py:NAME"),
    ("{file}:a b", "expected FILE.py:NAME"),
    ("{file}:missing", "expected the name 'missing'"),
    ("{file}:NUMBER", "expected a function, got int"),
    ("{file}:no_config", r"expected a function of \(view, config\)"),
    ("nowhere.py:schedule", "expected a file, got 'nowhere.py'"),
    ("no_such_module:schedule", "failed to import: ModuleNotFoundError"),
  ],
)
def test_errors_say_what_was_expected(file, spec, message):
  with pytest.raises(ValueError, match=message):
    load_policy(spec.format(file=file))


def test_a_file_that_fails_is_named_with_its_error(tmp_path):
  path = tmp_path / "broken.py"
  path.write_text("def schedule(view, config):\n  return (\n")
  with pytest.raises(ValueError, match=r"broken.py.*failed to import: SyntaxError"):
    load_policy(f"{path}:schedule")


def test_an_answer_that_is_no_plan_is_named(tmp_path):
  path = tmp_path / "forgets.py"
  path.write_text("def schedule(view, config):\n  view.waiting\n")
  with pytest.raises(ValueError, match=r"forgets\.py:schedule': expected a StepPlan, got NoneType"):
    load_policy(f"{path}:schedule")(view(*WAITING))
