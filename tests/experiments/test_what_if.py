import dataclasses
import json

import pytest

from experiments import flags, what_if
from experiments.measured_run import MeasuredRun
from strata_jax import simulation as sim
from strata_jax.scheduler.views import Costs
from tests.experiments import simulated_points

MACHINE = sim.find_profile("h200", "llama31_8b")
SHOWN = Costs(load_s_per_token=3e-6, compute_s_per_token=2e-5, decode_step_s=6e-3)


def _points(out, **fields):
  shape = dataclasses.replace(simulated_points.SHAPE, queries=40)
  return simulated_points.write(
    out, MACHINE, ("strata@16", "hicache_paper"), ("strata@16:5:40", "hicache_paper:5"),
    repeats=2, shape=shape, shown=SHOWN, **fields,
  )  # fmt: skip


@pytest.fixture(scope="module")
def points(tmp_path_factory):
  return _points(tmp_path_factory.mktemp("points"))


def _run(out, *argv):
  what_if.main(what_if.FLAGS.parse([f"--out={out}", *argv]))
  return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def _measured(folder, label, rate):
  """Output tokens per second of the repeats."""
  chosen = MeasuredRun(folder).chosen(system=label, rate=rate)
  return [point.row["output_tokens_per_s"] for point in sorted(chosen, key=lambda p: p.repeat)]


def test_the_own_setting_gives_the_run_and_others_what_they_would_have(points, tmp_path, capsys):
  argv = (f"--run={points}", "--systems=strata@16", "--rate=40", "--seeds=2")
  own, *others = _run(tmp_path / "out", *argv, "--vary=rolling_loads:on:off,joint_tokens:0:256")
  captured = capsys.readouterr()
  assert own["own_setting"] is True
  assert (own["rolling_loads"], own["joint_tokens"]) == (True, 0)
  assert own["output_tokens_per_s_by_seed"] == _measured(points, "strata@16", 40.0)
  assert own["output_tokens_per_s"] == pytest.approx(
    sum(own["output_tokens_per_s_by_seed"]) / 2, rel=1e-12
  )
  assert [(row["rolling_loads"], row["joint_tokens"]) for row in others] == [
    (True, 256), (False, 0), (False, 256),
  ]  # fmt: skip

  executor = dataclasses.replace(simulated_points.EXECUTOR, joint_tokens=256)
  joint = _points(tmp_path / "joint", executor=executor)
  assert others[0]["output_tokens_per_s_by_seed"] == _measured(joint, "strata@16", 40.0)
  run = MeasuredRun(points)
  (point, _) = run.chosen(system="strata@16", rate=40.0)
  system = sim.system_with(point.system, {"scheduler.rolling_loads": False})
  found = run.simulate(point, MACHINE, run.workload(point), system=system).summary()
  assert others[1]["output_tokens_per_s_by_seed"][0] == found["output_tokens_per_s"]
  assert len({row["output_tokens_per_s"] for row in (own, *others)}) == 4
  for row in others:
    assert row["own_setting"] is False
    each = zip(*(one["output_tokens_per_s_by_seed"] for one in (row, own)), strict=True)
    ratios = [tokens / base for tokens, base in each]
    assert row["ratio_to_own"] == pytest.approx(sum(ratios) / 2)
    half = 12.706 * abs(ratios[0] - ratios[1]) / 2  # Student's t of one degree of freedom
    assert row["ci95"] == pytest.approx([row["ratio_to_own"] - half, row["ratio_to_own"] + half])
  assert own["ci95"] == [1.0, 1.0]

  summary = json.loads(captured.out.splitlines()[-1])
  assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
  assert [row["joint_tokens"] for row in summary["rows"]] == [0, 256, 0, 256]
  assert captured.err.splitlines()[-5].startswith("system")
  config = json.loads((tmp_path / "out" / "config.json").read_text())
  assert config["seed"] == simulated_points.SEED
  assert config["config"]["profile"] == "h200_llama31_8b"


def test_fields_that_the_policy_sets_stay_and_every_system_has_its_rate(points, tmp_path, capsys):
  rows = _run(tmp_path, f"--run={points}", "--vary=order:fcfs:shortest_load")
  assert [(row["system"], row["order"], row["rate_rps"]) for row in rows] == [
    ("strata@16", "fcfs", 5.0), ("strata@16", "shortest_load", 5.0), ("hicache_paper", "fcfs", 5.0),
  ]  # fmt: skip
  assert [row["own_setting"] for row in rows] == [True, False, True]
  error = capsys.readouterr().err
  assert "hicache_paper sets order=fcfs itself: not served with shortest_load" in error.splitlines()
  assert "lost:" not in error
  assert error.count("itself") == 1


POLICY = """
from strata_jax.scheduler.policies import schedule

def first_come(view, config):
  return schedule(view, config.__class__(order="fcfs", bubble_filling=False, deferral=False))

def the_own(view, config):
  return schedule(view, config)
"""


def test_a_policy_has_rows_behind_those_of_every_system(points, tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(POLICY)
  argv = (f"--run={points}", "--rate=40")
  rows = _run(tmp_path / "mine", *argv, f"--policy={path}:first_come")
  assert [(row["system"], row["own_setting"]) for row in rows] == [
    ("strata@16", True), ("strata@16 with mine.py:first_come", False),
    ("hicache_paper", True), ("hicache_paper with mine.py:first_come", False),
  ]  # fmt: skip
  assert rows[1]["output_tokens_per_s"] != rows[0]["output_tokens_per_s"]
  for own, row in zip(rows[::2], rows[1::2], strict=True):
    ratio = row["output_tokens_per_s"] / own["output_tokens_per_s"]
    assert row["ratio_to_own"] == pytest.approx(ratio)

  vary = "--vary=rolling_loads:on:off,joint_tokens:0:256"
  argv += ("--systems=strata@16", vary)
  rows = _run(tmp_path / "own", *argv, f"--policy={path}:the_own")
  assert len(rows) == 8
  for row, same in zip(rows[:4], rows[4:], strict=True):  # it is given the settings
    assert same["output_tokens_per_s"] == row["output_tokens_per_s"]


def test_what_a_named_policy_sets_is_told_as_that_of_a_system(points, tmp_path, capsys):
  argv = (f"--run={points}", "--systems=strata@16", "--policy=fcfs")
  rows = _run(tmp_path, *argv, "--vary=deferral:on")
  assert [(row["system"], row["deferral"]) for row in rows] == [
    ("strata@16", True), ("strata@16 with fcfs", False),
  ]  # fmt: skip
  error = capsys.readouterr().err
  assert "strata@16 with fcfs sets deferral=False itself: not served with True" in error


def test_settings_alone_and_lost_requests_are_told(points, tmp_path, capsys):
  (row,) = _run(tmp_path, f"--run={points}", "--systems=strata@16", "--rate=0.4")
  assert row["lost"] > 0
  error = capsys.readouterr().err
  assert "without --vary and --policy every system is served in its own setting alone" in error
  assert f"lost: {row['lost']} requests were refused, or not over" in error.splitlines()[-1]
  assert error.splitlines()[-1].endswith("after 60 s")


def test_requests_come_in_another_order_if_asked_for(points, tmp_path, capsys):
  argv = (f"--run={points}", "--systems=strata@16", "--rate=40", "--seeds=3")
  (plain,) = _run(tmp_path / "plain", *argv)
  (shuffled,) = _run(tmp_path / "shuffled", *argv, "--shuffle")
  plain, shuffled = (row["output_tokens_per_s_by_seed"] for row in (plain, shuffled))
  assert shuffled[0] == plain[0]
  assert len({*plain, *shuffled}) == 5
  assert "their intervals say nothing" not in capsys.readouterr().err

  run = MeasuredRun(points)
  one, other = (run.arriving(40.0, 7, shuffle=shuffle).requests for shuffle in (False, True))
  for field in ("request_id", "arrival_s"):
    assert [getattr(r, field) for r in one] == [getattr(r, field) for r in other]
  prompts, others = ([tuple(r.prompt_ids) for r in requests] for requests in (one, other))
  assert prompts != others
  assert sorted(prompts) == sorted(others)
  follows = dataclasses.replace(one[1], follows=one[0].request_id)
  run._plain_workload = run._plain_workload.with_requests([one[0], follows])
  with pytest.raises(ValueError, match="--shuffle: expected requests that do not follow others"):
    run.arriving(40.0, 7, shuffle=True)


def test_seeds_that_give_the_same_are_told(points, tmp_path, capsys):
  _run(tmp_path, f"--run={points}", "--systems=strata@16", "--rate=1e6", "--seeds=2")
  assert "seeds: 1 of 1 settings gave the same throughput with all 2" in capsys.readouterr().err


def test_what_counts_is_an_integer_and_may_be_infinite():
  (values,) = what_if.parse(["max_bypasses:8:8.0:inf"]).values()
  assert [(type(value), value) for value in values] == [(int, 8), (int, 8), (float, float("inf"))]
  assert what_if.parse(["window_s:0.5:1"]) == {"window_s": [0.5, 1.0]}


def test_clients_give_up_when_a_point_ends_however_they_arrive(points):
  run = MeasuredRun(points)
  for workload in (run.arriving(40.0, 7), run.workload(run.points[0]), run.arriving(None, 0)):
    for request in workload.requests:
      assert (request.arrival_s or 0.0) + request.abort_s == pytest.approx(60.0)
  assert run.arriving(40.0, 7).requests[-1].arrival_s < 2.0


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["--run="], "--run: expected a folder of `throughput`"),
    (["--seeds=0"], "--seeds: expected an integer >= 1, got 0"),
    (["--rate=-1"], r"--rate: expected a number > 0, got -1\.0"),
    (["--systems=pigeon"], "--systems: expected one of strata@16, hicache_paper, got 'pigeon'"),
    (["--policy=none.py:x"], "policy: expected a file, got 'none.py'"),
    (["--vary=pigeons:1"], "--vary: pigeons: no such field, expected a field of the scheduler or"),
    (["--vary=max_bypas:8"], "^--vary: max_bypas: no such field, expected max_bypasses$"),
    (["--vary=order"], "--vary: order: expected order:VALUE:VALUE..., got 'order'"),
    (["--vary=order:fcfs:"], "--vary: order: expected order:VALUE:VALUE..., got 'order:fcfs:'"),
    (["--vary=refill:on,refill:off"], "--vary: refill: expected once, with all.*got 'refill:off'"),
    (["--vary=max_bypasses:8.5"], "--vary: max_bypasses: expected an integer or inf, got 'max_by"),
    (["--vary=max_bypasses:nan"], "--vary: SchedulerConfig.max_bypasses: expected a number >= 1"),
    (["--vary=refill:maybe"], "--vary: refill: expected on or off, got 'refill:maybe'"),
    (["--vary=order:alphabet"], "--vary: SchedulerConfig.order: expected one of fcfs, .*alphabet"),
    (["--vary=max_bypasses:8:0"], "--vary: SchedulerConfig.max_bypasses: expected a number >= 1"),
    (["--vary=row_factor:4:1"], "--vary: row_factor: expected integers >= 2, got 1"),
  ],
)
def test_mistakes_get_one_line(points, tmp_path, argv, message):
  with pytest.raises(flags.UsageError, match=message):
    _run(tmp_path / "out", f"--run={points}", *argv)
  assert not (tmp_path / "out").exists()
