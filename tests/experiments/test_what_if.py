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
    ratio = row["output_tokens_per_s"] / own["output_tokens_per_s"]
    assert row["ratio_to_own"] == pytest.approx(ratio)

  summary = json.loads(captured.out.splitlines()[-1])
  assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
  assert [row["joint_tokens"] for row in summary["rows"]] == [0, 256, 0, 256]
  assert captured.err.splitlines()[-5].startswith("system")
  assert json.loads((tmp_path / "out" / "config.json").read_text())["seed"] == simulated_points.SEED


def test_fields_that_the_policy_sets_stay_and_every_system_has_its_rate(points, tmp_path):
  rows = _run(tmp_path, f"--run={points}", "--vary=order:fcfs:shortest_load")
  assert [(row["system"], row["order"], row["rate_rps"]) for row in rows] == [
    ("strata@16", "fcfs", 5.0), ("strata@16", "shortest_load", 5.0), ("hicache_paper", "fcfs", 5.0),
  ]  # fmt: skip
  assert [row["own_setting"] for row in rows] == [True, False, True]


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
    (["--systems=pigeon"], "--systems: expected some of strata@16, hicache_paper, got 'pigeon'"),
    (["--vary=pigeons:1"], r"--vary: expected FIELD.* one of order, .*row_factor.*got 'pigeons:1'"),
    (["--vary=order"], "--vary: expected FIELD:VALUE.*got 'order'"),
    (["--vary=refill:on,refill:off"], "--vary: expected .*each field once.*got 'refill:off'"),
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
