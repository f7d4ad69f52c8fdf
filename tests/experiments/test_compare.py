import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from experiments import compare, flags, run_folder
from strata_jax import recording
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import policy_config, schedule
from tests.scheduler.build import view, waits


def _run_folder(path, ttft, *, record=None):
  out = run_folder.open_run(path, {"flags": {"record": record}})
  rows = [
    {
      "request_id": i,
      "ttft_s": value,
      "queue_s": 0.1,
      "prompt_tokens": 10 + i,
      "tpot_s": None,
      "outcome": "finished",
    }
    for i, value in enumerate(ttft)
  ]
  run_folder.write_jsonl(out / "requests.jsonl", rows)
  return out


def _record(path, views, config):
  with recording.Recorder(path, policy="", config=config) as recorder:
    for one in views:
      recorder(one, schedule(one, config))
  return str(path)


@pytest.fixture
def ttfts():
  rng = np.random.default_rng(1)
  first = 1 + rng.random(200)
  return first, first - 0.3 + 0.5 * rng.random(200)


def _compare(tmp_path, capsys, *argv):
  compare.main(compare.FLAGS.parse([f"--out={tmp_path / 'out'}", *argv]))
  return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_paired_table(tmp_path, capsys, ttfts):
  a, b = (_run_folder(tmp_path / name, t) for name, t in zip("ab", ttfts, strict=True))
  summary = _compare(tmp_path, capsys, f"--run_a={a}", f"--run_b={b}")
  table = {row["metric"]: row for row in summary["table"]}
  ttft = table["ttft_s"]
  exact = float((ttfts[1] - ttfts[0]).mean())
  assert ttft["difference"] == pytest.approx(exact)
  assert ttft["ci95_low"] < exact < ttft["ci95_high"] < 0
  # The bootstrap agrees with the normal interval of 200 values.
  half = 1.96 * float((ttfts[1] - ttfts[0]).std()) / 200**0.5
  assert ttft["ci95_high"] - exact == pytest.approx(half, rel=0.2)
  assert ttft["verdict"] == "lower"
  assert table["queue_s"]["verdict"] == "not distinguishable"
  assert "tpot_s" not in table  # nobody has it


def test_winners_and_losers(tmp_path, capsys, ttfts):
  a, b = (_run_folder(tmp_path / name, t) for name, t in zip("ab", ttfts, strict=True))
  summary = _compare(tmp_path, capsys, f"--run_a={a}", f"--run_b={b}")
  change = ttfts[1] - ttfts[0]
  assert [entry["request_id"] for entry in summary["won"]] == list(np.argsort(change)[:10])
  assert [entry["request_id"] for entry in summary["lost"]] == list(np.argsort(-change)[:10])
  worst = summary["lost"][0]
  assert worst["b"]["ttft_s"] - worst["a"]["ttft_s"] == pytest.approx(worst["change"])
  back = _compare(tmp_path, capsys, f"--run_a={b}", f"--run_b={a}")
  assert [entry["request_id"] for entry in back["lost"]] == [
    entry["request_id"] for entry in summary["won"]
  ]


def test_a_run_against_itself(tmp_path, capsys, ttfts):
  a = _run_folder(tmp_path / "a", ttfts[0])
  summary = _compare(tmp_path, capsys, f"--run_a={a}", f"--run_b={a}")
  assert {row["verdict"] for row in summary["table"]} == {"not distinguishable"}
  assert (summary["won"], summary["lost"]) == ([], [])
  assert not summary["recorded"]


def test_requests_of_one_run_only_are_counted(tmp_path, capsys, ttfts):
  a = _run_folder(tmp_path / "a", ttfts[0])
  b = _run_folder(tmp_path / "b", ttfts[1][:150])
  summary = _compare(tmp_path, capsys, f"--run_a={a}", f"--run_b={b}")
  assert (summary["requests"], summary["only_in_a"], summary["only_in_b"]) == (150, 50, 0)


def test_first_diverging_decision(tmp_path, capsys, ttfts):
  twins = view(waits(0, (1, 500, "in_queue")), waits(1, (1, 500, "in_queue")), version=2)
  views = (view(waits(0)), twins, view(waits(2), version=3))
  strata, fcfs = SchedulerConfig(), policy_config("fcfs")
  first = _record(tmp_path / "a.jsonl", views, strata)
  second = _record(tmp_path / "b.jsonl.gz", views, fcfs)
  a = _run_folder(tmp_path / "a", ttfts[0], record=first)
  b = _run_folder(tmp_path / "b", ttfts[1], record=second)
  summary = _compare(tmp_path, capsys, f"--run_a={a}", f"--run_b={b}")
  diverges = summary["first_divergence"]
  assert (diverges["decision"], diverges["same_state"]) == (1, True)
  assert diverges["fields"]["deferred"]["first"] == [
    {"request_id": 1, "reason": "claimed", "waits_on": [1]}
  ]
  longer = _record(tmp_path / "c.jsonl", (*views, view(waits(3), version=4)), strata)
  argv = [f"--run_a={a}", f"--run_b={b}", f"--record_b={longer}", f"--out={tmp_path / 'out'}"]
  compare.main(compare.FLAGS.parse(argv))
  assert "all decisions are the same until A ends, at 3" in capsys.readouterr().err
  same = _compare(tmp_path, capsys, f"--run_a={a}", f"--run_b={b}", f"--record_b={first}")
  assert same["recorded"]
  assert same["first_divergence"] is None


def test_other_states_and_records_that_end(tmp_path):
  config = SchedulerConfig()
  one = view(waits(0), now_s=1.0)
  later = dataclasses.replace(one, now_s=2.0)
  fuller = dataclasses.replace(later, waiting=(waits(0), waits(1)))
  records = [
    recording.read_record(_record(tmp_path / f"{i}.jsonl", views, config))
    for i, views in enumerate(([one], [later], [fuller], [one, one]))
  ]
  assert compare.first_divergence(records[0], records[1]) is None
  found = compare.first_divergence(records[0], records[2])
  assert found is not None
  assert not found["same_state"]
  assert compare.first_divergence(records[0], records[3]) == {"decision": 1, "ends": "a"}


@pytest.mark.parametrize(
  ("text", "message"), [('{"request_id": 1', "requests.jsonl:1"), ("[1]", "requests.jsonl:1")]
)
def test_bad_rows_are_named(tmp_path, ttfts, text, message):
  a, b = (_run_folder(tmp_path / name, ttfts[0]) for name in "ab")
  (b / "requests.jsonl").write_text(text)
  with pytest.raises(flags.UsageError, match=message):
    compare.main(compare.FLAGS.parse([f"--run_a={a}", f"--run_b={b}", f"--out={tmp_path}/o"]))


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--metric=speed", "--metric: expected one of .*ttft_s.*, got 'speed'"),
    ("--metric=outcome", "--metric: expected one of"),
    ("--most=0", "--most: expected an integer >= 1"),
    ("--resamples=0", "--resamples: expected an integer >= 1"),
  ],
)
def test_mistakes_get_one_line(tmp_path, ttfts, flag, message):
  a, b = (_run_folder(tmp_path / name, t) for name, t in zip("ab", ttfts, strict=True))
  with pytest.raises(flags.UsageError, match=message):
    compare.main(compare.FLAGS.parse([f"--run_a={a}", f"--run_b={b}", f"--out={tmp_path}/o", flag]))


def test_one_record_of_two_runs_shows_nothing(tmp_path, ttfts):
  record = _record(tmp_path / "r.jsonl", [view(waits(0))], SchedulerConfig())
  a, b = (_run_folder(tmp_path / n, t, record=record) for n, t in zip("ab", ttfts, strict=True))
  with pytest.raises(flags.UsageError, match="expected a record a run, got one that both wrote"):
    compare.main(compare.FLAGS.parse([f"--run_a={a}", f"--run_b={b}", f"--out={tmp_path}/o"]))


def test_as_a_program(tmp_path, ttfts):
  a, b = (_run_folder(tmp_path / name, t) for name, t in zip("ab", ttfts, strict=True))
  argv = [sys.executable, "-m", "experiments.compare", str(a), f"--out={tmp_path}/o", str(b)]
  done = subprocess.run(argv, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  summary = json.loads(done.stdout.splitlines()[-1])
  assert (summary["run_a"], summary["run_b"], summary["requests"]) == (str(a), str(b), 200)
  for wrong in ([str(a)], [str(a), str(b), str(b)], [str(a), str(b), "--speed=1"]):
    argv = [sys.executable, "-m", "experiments.compare", *wrong]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
