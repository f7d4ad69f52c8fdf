import dataclasses
import gzip
import json

import pytest

from experiments import calibrate, flags, run_folder, simulate, validate
from experiments.measured_run import MeasuredRun
from strata_jax import simulation as sim
from strata_jax.cost_model import CostModel
from strata_jax.profile import ExecutorCosts
from tests.experiments import simulated_points

BASE = sim.find_profile("h200", "llama31_8b")
SLOWER = dataclasses.replace(
  BASE,
  hardware=dataclasses.replace(
    BASE.hardware,
    weight_read_bytes_per_s=0.7 * BASE.hardware.weight_read_bytes_per_s,
    attention_read_bytes_per_s=0.6 * BASE.hardware.attention_read_bytes_per_s,
  ),
  executor=ExecutorCosts(step_gap_s=1e-3, chunk_overhead_s=1e-3),
)


@pytest.fixture(scope="module")
def points(tmp_path_factory):
  return simulated_points.write(
    tmp_path_factory.mktemp("points"), SLOWER, ("strata@16",), ("strata@16:20:40",), repeats=2
  )


def run(out, *argv):
  calibrate.main(calibrate.FLAGS.parse([f"--out={out}", *argv]))
  return json.loads((out / "summary.json").read_text())


def test_all_repeats_of_a_system_at_a_rate(points, tmp_path, capsys):
  summary = run(tmp_path, f"--run={points}", "--system=strata@16", "--rate=40", "--name=slow")
  assert json.loads(capsys.readouterr().out.splitlines()[-1]) == summary
  assert summary["points"] == [1, 3]
  assert summary["profile"] == "slow_llama31_8b"
  found = {key: one["value"] for key, one in summary["fitted"].items()}
  hardware = SLOWER.hardware
  for name in ("weight_read_bytes_per_s", "attention_read_bytes_per_s"):
    assert found[f"hardware.{name}"] == pytest.approx(getattr(hardware, name), rel=0.02)
  assert found["executor.step_gap_s"] == pytest.approx(1e-3, rel=0.02)
  assert found["executor.chunk_overhead_s"] == pytest.approx(1e-3, rel=0.02)
  assert found["executor.loads_hold_compute"] == 0.0
  assert all(one["median_error"] < 0.01 for one in summary["residuals"].values())
  hardware = json.loads((tmp_path / "hardware_slow.json").read_text())
  leaf = hardware["weight_read_bytes_per_s"]
  assert leaf["kind"] == "measured"
  assert f"{points}, cpu, commit " in leaf["source"]
  assert "strata@16 at 40 requests/s" in leaf["source"]
  assert hardware["memory_bytes"]["source"] == BASE.sources["hardware.memory_bytes"]["source"]
  # The simulation takes the profile by its folder.
  compute_s = []
  for shapes in ((), ("--piece_tokens=512", "--prefill_rows=4")):
    simulate.main(simulate.FLAGS.parse([
      f"--profile_folder={tmp_path}", "--hardware=slow", "--limit=5", f"--out={tmp_path / 'run'}",
      *shapes,
    ]))  # fmt: skip
    rows = (tmp_path / "run" / "requests.jsonl").read_text().splitlines()
    compute_s.append(json.loads(rows[0])["compute_s"])
  assert compute_s[0] < compute_s[1] < 1.5 * compute_s[0]
  config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
  assert config["profile"] == "slow_llama31_8b"
  assert config["profile_numbers"]["executor.step_gap_s"]["kind"] == "measured"


def test_one_point_and_the_folder_of_one_run_with_the_same_steps(points, tmp_path):
  one = run(tmp_path / "a", f"--run={points}", "--point=2", "--min_steps=5")
  assert one["points"] == [2]
  assert one["buckets"]["chunk_tokens"] == [32, 128, 512]
  assert "chunks_apart" not in json.loads((tmp_path / "a" / "hardware_measured.json").read_text())
  single = run_folder.open_run(tmp_path / "single", {})
  with gzip.open(points / "steps.jsonl.gz", "rt") as file:
    rows = [row for row in map(json.loads, file) if row["point"] == 2]
  run_folder.write_jsonl(single / "steps.jsonl", rows)
  two = run(tmp_path / "b", f"--run={single}", "--system=strata@16", "--min_steps=5")
  assert two["points"] == []
  assert two["buckets"] is None
  # Without the shapes of its prefills, what does not depend on them is the same.
  for key in ("executor.step_gap_s", "hardware.attention_read_bytes_per_s"):
    assert two["fitted"][key] == one["fitted"][key]
  errors = [summary["residuals"]["prefill"]["median_error"] for summary in (one, two)]
  assert errors[0] < 0.001 < errors[1]


def test_rows_that_read_together_are_what_the_points_say(tmp_path):
  executor = dataclasses.replace(SLOWER.executor, decode_shares=2)
  machine = dataclasses.replace(SLOWER, executor=executor)
  points = simulated_points.write(
    tmp_path / "run", machine, ("strata@16",), ("strata@16:40",), repeats=2
  )
  summary = run(tmp_path / "out", f"--run={points}", "--system=strata@16")
  assert summary["fitted"]["executor.decode_shares"]["value"] == 2
  rate = machine.hardware.attention_read_bytes_per_s
  found = summary["fitted"]["hardware.attention_read_bytes_per_s"]["value"]
  assert found == pytest.approx(rate, rel=0.02)
  leaf = json.loads((tmp_path / "out" / "hardware_measured.json").read_text())["executor"]
  assert leaf["decode_shares"]["source"].startswith(f"said by {points}, cpu, commit ")
  assert sim.find_profile("measured", "llama31_8b", tmp_path / "out").executor.decode_shares == 2

  with pytest.raises(flags.UsageError, match="--decode_shares: expected none, as the points"):
    run(tmp_path / "x", f"--run={points}", "--point=0", "--decode_shares=2")
  single = run_folder.open_run(tmp_path / "single", {})
  with gzip.open(points / "steps.jsonl.gz", "rt") as file:
    run_folder.write_jsonl(single / "steps.jsonl", [json.loads(line) for line in file])
  argv = [f"--run={single}", "--system=strata@16"]
  assert run(tmp_path / "y", *argv, "--decode_shares=2")["fitted"]["executor.decode_shares"]
  with pytest.raises(flags.UsageError, match="decode_shares: expected more than 1, as"):
    run(tmp_path / "z", *argv)

  rows = (points / "points.jsonl").read_text()
  for new, message in (("3", "expected points of one decode_shares"), ("0", "integer >= 1, got 0")):
    changed = rows.replace('"decode_shares": 2', f'"decode_shares": {new}', 1)
    (points / "points.jsonl").write_text(changed)
    with pytest.raises(flags.UsageError, match=message):
      run(tmp_path / "w", f"--run={points}", "--system=strata@16")


def test_joint_passes_are_those_of_the_runs_executor(tmp_path):
  executor = dataclasses.replace(simulated_points.EXECUTOR, joint_tokens=128)
  points = simulated_points.write(
    tmp_path / "run", SLOWER, ("strata@16",), ("strata@16:40",), repeats=2, executor=executor
  )
  argv = (f"--run={points}", "--system=strata@16", "--min_steps=5")
  summary = run(tmp_path / "a", *argv)
  assert summary["buckets"]["joint_tokens"] == 128
  assert summary["residuals"]["joint"]["steps"] > 10
  assert summary["residuals"]["joint"]["median_error"] < 0.005
  for name in ("weight_read_bytes_per_s", "attention_read_bytes_per_s"):
    found = summary["fitted"][f"hardware.{name}"]["value"]
    assert found == pytest.approx(getattr(SLOWER.hardware, name), rel=0.02)
  measured = MeasuredRun(points)
  replayed = validate.replay(measured, measured.points[0], SLOWER)
  assert replayed["ttft_mean_s"] == measured.points[0].row["ttft_mean_s"]
  # A run from before there were joint passes.
  (tmp_path / "old").mkdir()
  config = json.loads((points / "config.json").read_text())
  del config["config"]["bench"]["executor"]["joint_tokens"]
  old = _break(points, tmp_path / "old", "points.jsonl", "", "")
  (old / "config.json").write_text(json.dumps(config))
  assert MeasuredRun(old).buckets(measured.points[0]).joint_tokens == 0


@pytest.fixture(scope="module")
def two_systems(tmp_path_factory):
  return simulated_points.write(
    tmp_path_factory.mktemp("two"), SLOWER, ("strata@16", "hicache_paper@32"),
    ("strata@16:20:40", "hicache_paper@32:20"), repeats=2,
  )  # fmt: skip


def with_costs(points, tmp_path, costs_of):
  """A copy of the folder, its rows with what `costs_of(row)` says beside what they have."""
  copy = _break(points, tmp_path, "points.jsonl", "", "")
  rows = map(json.loads, (copy / "points.jsonl").read_text().splitlines())
  (copy / "points.jsonl").unlink()
  run_folder.write_jsonl(copy / "points.jsonl", [{**row, **costs_of(row)} for row in rows])
  return copy


def _load(seconds, **fields):
  return {"costs": {"load_s_per_token": seconds, "load_latency_s": 0.003}, **fields}


def test_other_back_ends_load_at_the_rate_measured_before_serving(two_systems, tmp_path, capsys):
  token_s = BASE.kv_bytes_token / 15e9
  copy = tmp_path / "run"
  copy.mkdir()
  of_system = {
    "strata@16": lambda row: _load(1.0, load_io="kernel"),
    # One value each command, whatever the number of its points.
    "hicache_paper@32": lambda row: _load(
      token_s * (0.9 if row["repeat"] else 1.1), command=row["repeat"], load_io="memcpy_async"
    ),
  }
  with_costs(two_systems, copy, lambda row: of_system[row["system"]](row))
  argv = (f"--run={copy}", "--system=strata@16", "--rate=40")
  summary = run(tmp_path / "on", *argv)
  key = "load.memcpy_async@65536"
  source = f"timed loads of 2 commands of {copy} before serving, hicache_paper@32"
  assert summary["fitted"][key]["value"] == pytest.approx(15.0)
  assert summary["fitted"][key]["source"] == source
  assert f"taken {key}: 15.0 GB/s, {source}" in capsys.readouterr().err
  off = run(tmp_path / "off", *argv, "--nomeasured_io")
  assert set(summary["fitted"]) - set(off["fitted"]) == {key}
  assert off["fitted"] == {name: summary["fitted"][name] for name in off["fitted"]}
  assert (off["residuals"], off["kept"]) == (summary["residuals"], summary["kept"])
  io = sim.io_config(MeasuredRun(copy).chosen(system="hicache_paper@32", rate=20)[0].system)
  machines = [
    sim.find_profile("measured", "llama31_8b", tmp_path / folder) for folder in ("on", "off")
  ]
  assert CostModel(machines[0], io).load_rate == pytest.approx(15e9)
  assert CostModel(machines[1], io).load_rate == CostModel(BASE, io).load_rate
  assert (
    machines[0]
    .sources["load.memcpy_async"]["source"]
    .startswith(f"the point at 65536 bytes {source}; its other points, ")
  )


@pytest.mark.parametrize("costs", [None, {}, {"load_s_per_token": 0.0}])
def test_costs_that_were_not_measured_leave_the_base_and_a_reason(two_systems, tmp_path, costs):
  copy = tmp_path / "run"
  copy.mkdir()
  with_costs(two_systems, copy, lambda row: {"costs": costs})
  summary = run(tmp_path / "out", f"--run={copy}", "--system=strata@16", "--rate=40")
  assert summary["kept"]["load.memcpy_async@65536"] == (
    "hicache_paper@32 has no measured costs of loads"
  )
  text = (tmp_path / "out" / "hardware_measured.json").read_text()
  assert (
    json.loads(text)["load"]["memcpy_async"]["source"]
    == (BASE.sources["load.memcpy_async"]["source"])
  )


def _break(points, tmp_path, name, old, new):
  """A copy of the folder with one thing changed in a file."""
  for file in points.iterdir():
    (tmp_path / file.name).write_bytes(file.read_bytes())
  text = (tmp_path / name).read_text()
  assert old in text
  (tmp_path / name).write_text(text.replace(old, new))
  return tmp_path


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    ([], "expected points of one system and rate for --point=None"),
    (
      ["--system=strata@16"],
      "expected points of one system and rate .* got 4 of 0: strata@16 at 20",
    ),
    (["--point=99"], "got 0 of"),
    (["--system=strata@1"], r"^--system: expected one of strata@16, got 'strata@1'$"),
    (["--point=2", "--base_profile=h300"], "--base_profile: expected one of .*, got 'h300'"),
    (["--point=2", "--name=h200"], "name: expected the name of a new machine, got 'h200'"),
    (["--point=2", "--min_steps=5000"], "min_steps: expected at least 5000 decode steps .*, got"),
    (["--point=2", "--min_steps=0"], "min_steps: expected an integer >= 1, got 0"),
  ],
)
def test_mistakes_get_one_line(points, tmp_path, argv, message):
  with pytest.raises(flags.UsageError, match=message):
    run(tmp_path, f"--run={points}", *argv)


def test_a_folder_that_is_none(tmp_path):
  with pytest.raises(flags.UsageError, match="--run: expected a folder"):
    run(tmp_path)
  with pytest.raises(flags.UsageError, match=r"--system: expected NAME or NAME@PAGE_SIZE"):
    run(tmp_path, f"--run={tmp_path}")
  with pytest.raises(flags.UsageError, match=r"steps\.jsonl: No such file"):
    run(tmp_path, f"--run={tmp_path}", "--system=strata")
  with pytest.raises(flags.UsageError, match=r"^--run: expected a folder, got /nowhere$"):
    run(tmp_path, "--run=/nowhere", "--point=2")
  with pytest.raises(flags.UsageError, match=r"^--base_folder: expected a folder, got /nowhere$"):
    run(tmp_path, f"--run={tmp_path}", "--base_folder=/nowhere")


def test_a_run_of_another_model_than_the_profiles_is_told(points, tmp_path, capsys):
  right = MeasuredRun(points)
  assert right.other_model(BASE) is None
  other = _break(points, tmp_path, "config.json", '"name": "llama31_8b"', '"name": "llama31_70b"')
  run(tmp_path / "out", f"--run={other}", "--system=strata@16", "--rate=40")
  told = capsys.readouterr().err
  assert f"warning: {other} served llama31_70b (80 layers of 8192), h200_llama31_8b has 32" in told
  run(tmp_path / "right", f"--run={points}", "--system=strata@16", "--rate=40")
  assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
  ("name", "old", "new", "message"),
  [
    ("points.jsonl", '"rate_rps"', '"rate"', r"points\.jsonl: expected the field 'rate_rps'"),
    ("config.json", '"initial_cache"', '"cache"', r"config\.json: .*'config.bench.initial_cache'"),
    ("config.json", '"step_tokens"', '"steps"', r"config\.json, config\.bench\.serving: "),
    ("points.jsonl", '{"order": 0', '{"order" 0', r"points\.jsonl, line 1: expected JSON"),
  ],
)
def test_errors_name_file_and_field(points, tmp_path, name, old, new, message):
  broken = _break(points, tmp_path, name, old, new)
  with pytest.raises(flags.UsageError, match=message):
    run(tmp_path / "out", f"--run={broken}", "--point=2")
