import dataclasses
import gzip
import json

import pytest

from experiments import calibrate, flags, validate, validation_bound, validation_table
from experiments.measured_run import MeasuredRun
from strata_jax import simulation as sim
from strata_jax.profile import ExecutorCosts
from strata_jax.scheduler.views import Costs
from tests.experiments import simulated_points

BASE = sim.find_profile("h200", "llama31_8b")
# In a closed formula: decode and prefill of a machine whose every step begins 20 ms late.
LATE = dataclasses.replace(BASE, executor=ExecutorCosts(step_gap_s=0.02))
SYSTEMS = ("hicache_paper", "strata@16")
RATES = ("hicache_paper:6", "strata@16:10:20")


@pytest.fixture(scope="module")
def late(tmp_path_factory):
  out = tmp_path_factory.mktemp("late")
  shape = dataclasses.replace(simulated_points.SHAPE, queries=60)
  return simulated_points.write(out, LATE, SYSTEMS, RATES, repeats=2, shape=shape)


@pytest.mark.slow
def test_a_bound_is_simulated_at_equal_ttft(late, tmp_path, monkeypatch):
  found = validation_bound.at_equal_ttft(
    MeasuredRun(late), MeasuredRun(late).points[0], LATE, "oracle_io", 1.25
  )
  slow = validation_bound.at_equal_ttft(
    MeasuredRun(late), MeasuredRun(late).points[0], LATE, "hicache_paper", 1.25
  )
  for one in (found, slow):
    assert one["mean_ttft_s"] <= 1.25
    assert one["rate_rps"] > 0
  assert found["output_tokens_per_s"] > 1.2 * slow["output_tokens_per_s"]  # loads are free
  half = 0.5 * found["output_tokens_per_s"]
  reached = {"strata@16": half, "hicache_paper": None}
  monkeypatch.setattr(validate, "_reached", lambda run, ttft_s: reached)
  bound = run(tmp_path / "bound", f"--run={late}", "--bound=oracle_io")["bound"]
  assert bound["system"] == "oracle_io"
  assert bound["real_of_bound"]["hicache_paper"] is None
  most = bound["output_tokens_per_s"]  # on another machine, whose steps are not late
  assert bound["real_of_bound"]["strata@16"] == pytest.approx(half / most)
  assert most > found["output_tokens_per_s"]
  assert run(tmp_path / "none", f"--run={late}", "--bound=none")["bound"] is None


def run(out, *argv):
  if not any(arg.startswith("--bound") for arg in argv):
    argv = (*argv, "--bound=none")
  validate.main(validate.FLAGS.parse([f"--out={out}", *argv]))
  return json.loads((out / "validation.json").read_text())


def test_the_right_profile_shows_no_error_and_another_one_the_error_it_has(late, tmp_path, capsys):
  argv = [f"--run={late}", "--system=strata@16", "--rate=20", "--name=late", "--min_steps=5"]
  profile = tmp_path / "profile"
  calibrate.main(calibrate.FLAGS.parse([f"--out={profile}", *argv]))
  capsys.readouterr()
  right = run(
    tmp_path / "right",
    f"--run={late}",
    f"--profile_folder={profile}",  # it has one profile
  )
  summary = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert summary["points"] == summary["points_ok"] == 6
  assert summary["points_fitted"] == 2
  assert summary["points_not_fitted_ok"] == 4
  assert summary["ratios"] == summary["ratios_ok"] > 0
  assert [row["fitted"] for row in right["points"]].count(True) == 2
  assert all(row["system"] == "strata@16" and row["rate_rps"] == 20
             for row in right["points"] if row["fitted"])  # fmt: skip
  for row in right["points"]:
    assert abs(row["error"]["ttft_mean_s"]) < 0.1  # one decision may turn out otherwise
    assert abs(row["error"]["output_tokens_per_s"]) < 0.01
    assert row["simulated"]["device_hit_tokens"] == row["real"]["device_hit_tokens"]
  assert right["mean_error"]["ttft_mean_s"] < 0.03
  for name in ("ttft.png", "throughput.png"):
    assert (tmp_path / "right" / name).stat().st_size > 1000

  wrong = run(tmp_path / "wrong", f"--run={late}")
  assert wrong["profile"] == "h200_llama31_8b"
  assert not any(row["fitted"] for row in wrong["points"])
  for row in wrong["points"]:
    real, simulated = row["real"], row["simulated"]
    # A prefill and the decode step that it may wait for are each 20 ms late.
    assert real["ttft_mean_s"] - simulated["ttft_mean_s"] > 0.02
    assert real["tpot_mean_s"] - simulated["tpot_mean_s"] > 0.02
    exact = simulated["ttft_mean_s"] / real["ttft_mean_s"] - 1
    assert row["error"]["ttft_mean_s"] == pytest.approx(exact)
    assert not row["ttft_ok"]
    assert not row["ok"]
  assert wrong["bias"]["ttft_mean_s"] < -0.15
  assert wrong["mean_error"]["ttft_mean_s"] == pytest.approx(-wrong["bias"]["ttft_mean_s"])
  assert {(s["system"], s["rate_rps"]) for s in wrong["spread_of_repeats"]} == {
    ("hicache_paper", 6.0), ("strata@16", 10.0), ("strata@16", 20.0),
  }  # fmt: skip
  assert all(s["repeats"] == 2 and s["real_ttft_mean_s"] > 0 for s in wrong["spread_of_repeats"])


def test_the_exact_profile_gives_the_exact_run_with_the_costs_that_were_shown(tmp_path):
  shape = dataclasses.replace(simulated_points.SHAPE, queries=40)
  shown = Costs(load_s_per_token=3e-6, compute_s_per_token=2e-5, decode_step_s=6e-3)
  points = simulated_points.write(
    tmp_path / "run", BASE, ("strata@16",), ("strata@16:25",), shape=shape, shown=shown
  )
  (row,) = run(tmp_path / "out", f"--run={points}")["points"]
  assert row["real"] == row["simulated"]
  assert all(error in (0.0, None) for error in row["error"].values())
  # With other costs the policy decides otherwise.
  noted = json.loads((points / "points.jsonl").read_text())
  noted["costs"]["load_s_per_token"] = 1e-2
  (points / "points.jsonl").write_text(json.dumps(noted) + "\n")
  (row,) = run(tmp_path / "other", f"--run={points}")["points"]
  assert row["real"] != row["simulated"]


def test_the_run_says_how_many_rows_read_together(tmp_path):
  shape = dataclasses.replace(simulated_points.SHAPE, queries=40)
  executor = ExecutorCosts(decode_shares=2)
  points = simulated_points.write(
    tmp_path / "run", dataclasses.replace(BASE, executor=executor),
    ("strata@16",), ("strata@16:60",), shape=shape,
  )  # fmt: skip
  (row,) = run(tmp_path / "out", f"--run={points}")["points"]
  assert row["real"] == row["simulated"]
  noted = json.loads((points / "points.jsonl").read_text())
  del noted["decode_shares"]  # as in runs from before there was such a thing
  (points / "points.jsonl").write_text(json.dumps(noted) + "\n")
  (row,) = run(tmp_path / "other", f"--run={points}")["points"]
  assert row["simulated"]["tpot_mean_s"] > row["real"]["tpot_mean_s"]


def _edit(folder, tmp_path, name, change):
  """A copy of the folder; `change` is given the first row of a file."""
  for file in folder.iterdir():
    (tmp_path / file.name).write_bytes(file.read_bytes())
  with gzip.open(tmp_path / name, "rt") as file:
    first, *rest = [json.loads(line) for line in file]
  rows = [row for row in (change(first), *rest) if row is not None]
  with gzip.open(tmp_path / name, "wt") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
  return tmp_path


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda row: row | {"prompt_tokens": 7}, "request 0: expected prompt_tokens .*, got 7"),
    (lambda row: row | {"arrival_s": 99.0}, "request 0: expected arrival_s .*, got 99"),
    (lambda row: row | {"output_tokens": 999}, "request 0: expected output_tokens .*, got 999"),
    (lambda row: None, "point 0: expected 60 requests, got 59"),
    (lambda row: {"x": 1}, "expected the field 'point'"),
  ],
)
def test_other_requests_than_the_rows_say_are_refused(late, tmp_path, change, message):
  broken = _edit(late, tmp_path, "requests.jsonl.gz", change)
  with pytest.raises(flags.UsageError, match=rf"requests\.jsonl\.gz.*{message}"):
    run(tmp_path / "out", f"--run={broken}")


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    ([], "--run: expected a folder of `throughput`"),
    (["--run=/nowhere", "--targets=5,0"], "--targets: expected numbers > 0"),
    (["--run=/nowhere", "--ttft_error=-1"], "ttft_error: expected a number >= 0.0, got -1.0"),
    (["--run=/nowhere"], r"/nowhere/config\.json: No such file"),
    (["--run=/x", "--profile_folder=/nowhere"], "--profile_folder: expected a folder, got /nowh"),
    (["--run=/nowhere", "--bound=pigeon"], "--bound: expected one of .*, got 'pigeon'"),
    (["--run=/nowhere", "--profile=x"], "profile: expected one of .*, got 'x'"),
  ],
)
def test_mistakes_get_one_line(tmp_path, argv, message):
  with pytest.raises(flags.UsageError, match=message):
    run(tmp_path, *argv)


def _point(system, rate, ttft, tokens, repeat=0):
  values = dict.fromkeys(validation_table.METRICS, 1.0)
  values |= {"ttft_mean_s": ttft, "output_tokens_per_s": tokens}
  return {
    **dict.fromkeys(validation_table.crossing.KEPT, 1.0), **values, "system": system,
    "rate_rps": rate, "repeat": repeat, "drain_s": 0.0, "arrival_span_s": 10.0, "lost": 0,
  }  # fmt: skip


def test_verdicts_are_those_of_the_limits():
  limits = validation_table.Limits()
  real = _point("a", 1.0, 1.0, 100.0)
  for ttft, tokens, ok in (
    (1.14, 109.0, (True, True)), (0.86, 91.0, (True, True)), (1.16, 100.0, (True, False)),
    (1.0, 89.0, (False, True)), (None, 100.0, (True, False)),
  ):  # fmt: skip
    row = validation_table.point_row({}, real, _point("a", 1.0, ttft, tokens), limits)
    assert (row["throughput_ok"], row["ttft_ok"]) == ok
    assert row["ok"] == all(ok)


def test_errors_of_shares_are_differences():
  real = _point("a", 1.0, 1.0, 1.0) | {"stall_fraction": 0.02, "loaded_tokens": 0}
  simulated = _point("a", 1.0, 1.0, 1.0) | {"stall_fraction": 0.05, "loaded_tokens": 10}
  names = {"system": "a", "rate_rps": 1.0, "repeat": 0, "fitted": False}
  row = validation_table.point_row(names, real, simulated, validation_table.Limits())
  assert row["error"]["stall_fraction"] == pytest.approx(0.03)
  assert row["error"]["loaded_tokens"] is None  # of nothing
  assert "mean TTFT +0.0%, " in validation_table.line(row)
  assert "stall +0.03:" in validation_table.line(row)


def test_ratios_are_taken_at_equal_ttft_and_at_the_highest_throughput():
  def points(factor):
    return [
      _point(name, rate, rate * slow, speed * rate)
      for name, slow, speed in (("base", 0.5, 10.0), ("other", 0.25, 10.0 * factor))
      for rate in (1.0, 2.0, 4.0)
    ]

  found = validation_table.ratios(
    points(1.0), points(1.2), {1.0: 0.75}, "base", validation_table.Limits()
  )
  equal, highest = found
  assert equal["at"] == "mean TTFT of 1 T_ref"
  # base reaches 0.75 s between 1 and 2 requests/s, the other one between 2 and 4.
  assert equal["real"] == pytest.approx(2.0)
  assert equal["simulated"] == pytest.approx(2.4)
  assert highest["real"] == pytest.approx(1.0)
  for row in found:
    assert row["system"] == "other"
    assert row["error"] == pytest.approx(0.2)
    assert row["ok"] is False
