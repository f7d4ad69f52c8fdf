import json

import pytest

from experiments import flags, simulate
from tests.shared_data import shared_data

KEYS = {
  "requests",
  "ttft_mean_s",
  "ttft_p50_s",
  "ttft_p90_s",
  "ttft_p95_s",
  "ttft_p99_s",
  "ttft_from_dispatch_mean_s",
  "tpot_mean_s",
  "tpot_p99_s",
  "goodput_rps",
  "output_tokens_per_s",
  "requests_per_s",
  "device_hit_tokens",
  "host_hit_tokens",
  "storage_hit_tokens",
  "delay_hit_tokens",
  "bundle_hit_tokens",
  "computed_tokens",
  "recomputed_tokens",
  "loaded_tokens",
  "load_gbps",
  "stall_fraction",
  "bubble_fraction",
  "deferred",
  "postponed",
  "longest_wait_rounds",
  "jain_fairness",
  "saturated",
  "drain_s",
  "wall_s",
}


def run(out, capsys, *argv):
  simulate.main(simulate.FLAGS.parse([f"--out={out}", *argv]))
  summary = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert summary == json.loads((out / "summary.json").read_text())
  return summary


def test_a_run_folder_with_all_keys_and_a_waterfall_for_each_request(tmp_path, capsys):
  summary = run(tmp_path, capsys, "--limit=40", "--request_rate=20", "--initial_cache=host_warm")
  assert set(summary) >= KEYS
  rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
  assert len(rows) == 40 == summary["requests"]
  for row in rows:
    assert row["client_s"] + row["queue_s"] + row["prefill_s"] == pytest.approx(row["ttft_s"])
    assert row["stall_s"] + row["compute_s"] <= row["prefill_s"] + 1e-9
  assert (tmp_path / "waterfall.png").exists()
  config = json.loads((tmp_path / "config.json").read_text())["config"]
  assert config["profile_numbers"]["hardware.gate_s"]["kind"] == "measured"


def test_the_same_flags_give_the_same_rows_byte_for_byte(tmp_path, capsys):
  argv = ["--limit=40", "--request_rate=50", "--system=hicache_paper"]
  for name in ("a", "b"):
    run(tmp_path / name, capsys, *argv)
  for file in ("requests.jsonl", "steps.jsonl"):
    assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
  run(tmp_path / "c", capsys, *argv, "--seed=1")
  assert (tmp_path / "a" / "requests.jsonl").read_bytes() != (
    tmp_path / "c" / "requests.jsonl"
  ).read_bytes()


def test_the_first_rows_of_the_mooncake_trace_and_its_overload(tmp_path, capsys):
  trace = ["--trace", str(shared_data("mooncake/conversation_trace.jsonl")), "--limit=80",
           "--page_size=16"]  # fmt: skip
  own = run(tmp_path, capsys, *trace)
  slow = run(tmp_path, capsys, *trace, "--arrival_speedup=0.05")
  assert own["saturated"]
  assert not slow["saturated"]
  assert own["page_size"] == 16
  assert slow["ttft_mean_s"] < own["ttft_mean_s"]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["shuffled", "spread"])
def test_loogle_like_hit_rate_under_write_through(tmp_path, capsys, order):
  # Slow enough for every context to be backed up before it is asked about again.
  summary = run(
    tmp_path, capsys, f"--workload=loogle_like_{order}", "--request_rate=0.9", "--page_size=16"
  )
  assert summary["hit_ratio"] == pytest.approx(0.956, abs=0.005)


def test_flags_change_the_scheduler(tmp_path, capsys):
  argv = ["--limit=30", "--arrivals=closed", "--workload=loogle_like_adjacent"]
  on = run(tmp_path, capsys, *argv)
  off = run(tmp_path, capsys, *argv, "--deferral=off")
  assert on["deferred"] > 0 == off["deferred"]


def test_joint_passes_are_asked_for_with_the_shapes(tmp_path, capsys):
  argv = ["--limit=60", "--request_rate=20", "--initial_cache=host_warm", "--piece_tokens=512"]
  joint = {}
  for tokens in (0, 128):
    run(tmp_path, capsys, *argv, f"--joint_tokens={tokens}")
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    joint[tokens] = sum(row["joint"] for row in rows)
  assert joint[0] == 0 < joint[128]


def test_slos_bound_the_goodput(tmp_path, capsys):
  argv = ["--limit=30", "--request_rate=20", "--workload=no_reuse"]
  free = run(tmp_path, capsys, *argv)
  bound = run(tmp_path, capsys, *argv, "--slo_ttft_s=0.3")
  assert 0 <= bound["goodput_rps"] < free["goodput_rps"]


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["--workload=other"], "--workload: expected one of loogle_like"),
    (["--trace=none.jsonl"], r"none\.jsonl"),
    (["--trace_format=mooncake"], "--trace_format: expected --trace beside it, got mooncake"),
    (["--system=other"], "system: expected one of"),
    (["--hardware=tpu"], "hardware, model: expected .* got 'tpu' and 'llama31_8b'"),
    (["--profile_folder=/nowhere"], "--profile_folder: expected a folder, got /nowhere"),
    (["--initial_cache=hot"], "initial_cache: expected one of"),
    (["--arrivals=poisson"], "--request_rate: expected a rate"),
    (["--arrivals=trace", "--request_rate=3"], "--request_rate: expected none"),
    (["--request_rate=0"], "expected a number > 0"),
    (["--limit=0"], "--limit: expected"),
    (["--policy=none.py:x", "--limit=2"], "policy: expected a file"),
    (["--write_policy=never"], "write_policy: expected one of"),
    (["--seed=-1"], "--seed: expected an integer >= 0"),
    (["--slo_ttft_s=0"], "--slo_ttft_s: expected a number > 0"),
    (["--joint_tokens=128"], "--joint_tokens: expected 0 without --piece_tokens, got 128"),
    (["--piece_tokens=512", "--joint_tokens=-1"], "--joint_tokens: expected an integer >= 0"),
    (["--system=sglang_device", "--store=x"], "--store: expected a system with a host tier"),
  ],
)
def test_mistakes_get_one_line(tmp_path, argv, message):
  with pytest.raises(flags.UsageError, match=message):
    simulate.main(simulate.FLAGS.parse([f"--out={tmp_path}", *argv]))
