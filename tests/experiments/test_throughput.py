import gzip
import json

import pytest

from experiments import flags, throughput, throughput_folder, throughput_plan, throughput_table
from experiments.sweeps import crossing, rate_search

_TINY = [
  "--model=tiny",
  "--contexts=3",
  "--context_tokens=100",
  "--queries=9",
  "--question_tokens=8",
  "--output_tokens=4",
  "--device_tokens=256",
  "--host_tokens=2048",
  "--step_tokens=64",
  "--running_requests=1",
  "--requests_in_flight=8",
  "--reference_requests=1",
]
_TWO = [
  "--systems=vllm_lmcache_like@8,device_put@8",
  "--rates=vllm_lmcache_like@8:40,device_put@8:50",
]


_MINE = """
from strata_jax.scheduler.policies import plan_step, stages_of

def mine(view, config):
  with open({seen!r}, "a") as file:
    print(min(view.costs.load_s_per_token, view.costs.compute_s_per_token), file=file)
  return plan_step(view, config, stages_of(config))
"""


def _run(capsys, out, *arguments):
  throughput.main(throughput.FLAGS.parse([*_TINY, f"--out={out}", *arguments]))
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 1
  summary = json.loads(lines[0])
  assert summary == json.loads((out / "summary.json").read_text())
  return summary, [json.loads(line) for line in (out / "points.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_other_outputs_than_without_a_cache_are_an_error(tmp_path, capsys):
  one = ["--systems=device_put@8", "--rates=device_put@8:50", "--checked_requests=3"]
  assert throughput.main(throughput.FLAGS.parse([*_TINY, f"--out={tmp_path / 'run'}", *one])) == 0
  path = tmp_path / "run" / "points.jsonl"
  row = json.loads(path.read_text())
  assert row["checked_requests"] == 3
  path.write_text(json.dumps({**row, "outputs_identical": False, "different_requests": [7]}) + "\n")
  assert throughput.main(throughput.FLAGS.parse([*_TINY, f"--out={tmp_path / 'run'}", *one])) == 1
  assert "device_put@8 at 50 requests/s, repeat 0: other outputs of requests [7]" in (
    capsys.readouterr().err
  )


def _gz(path):
  with gzip.open(path, "rt", encoding="utf-8") as file:
    return [json.loads(line) for line in file]


@pytest.mark.slow
def test_points_are_warm_on_the_host_and_a_second_run_adds_what_is_missing(tmp_path, capsys):
  out = tmp_path / "run"
  summary, rows = _run(capsys, out, *_TWO)
  assert {path.name for path in out.iterdir()} == {
    "config.json", "points.jsonl", "requests.jsonl.gz", "steps.jsonl.gz", "summary.json"
  }  # fmt: skip
  assert [(r["system"], r["rate_rps"]) for r in rows] == [("vllm_lmcache_like@8", 40.0),
                                                          ("device_put@8", 50.0)]  # fmt: skip
  assert summary["points"] == 2
  assert summary["not_reached"] == []
  assert summary["t_ref_s"] > 0
  contexts = 3
  for row, warmed in zip(rows, (contexts, 0), strict=True):
    assert row["warmed_contexts"] == warmed  # equal caches share what is on the host
    assert row["finished"] == 9
    assert row["lost"] == row["recompiles"] == 0
    assert row["exact_output_lengths"]
    assert row["reference_ttft_s"] == summary["t_ref_s"]
    assert row["host_launch_ms_median"] > 0
    assert row["device_of_working_set"] == pytest.approx(256 / row["working_set_tokens"])
    # Contexts are hit, but for a part of a page each; questions are new in every point.
    assert row["computed_tokens"] < row["prompt_tokens"] - 9 * (100 - 3 * 8)
    assert row["computed_tokens"] >= 9 * 8 * 0.9
    requests = [r for r in _gz(out / "requests.jsonl.gz") if r["point"] == row["order"]]
    assert len(requests) == 9
    first = min(requests, key=lambda r: r["arrival_s"])
    assert first["host_hit_tokens"] == first["prompt_tokens"] - first["computed_tokens"] > 50
    steps = [s for s in _gz(out / "steps.jsonl.gz") if s["point"] == row["order"]]
    assert len(steps) == row["steps"]
    assert all(s["host_launch_s"] > 0 for s in steps if s["prefill_requests"])
  assert rows[1]["load_io"] == "device_put"
  before = (out / "points.jsonl").read_text()
  nothing, again = _run(capsys, out, *_TWO)
  assert nothing["t_ref_s"] == summary["t_ref_s"]
  assert (out / "points.jsonl").read_text() == before
  summary, more = _run(capsys, out, *_TWO, "--repeats=2")
  assert more[:2] == again
  # The second repeat begins with the other system.
  assert [(r["system"], r["repeat"]) for r in more[2:]] == [("device_put@8", 1),
                                                            ("vllm_lmcache_like@8", 1)]  # fmt: skip
  assert [r["command"] for r in more] == [0, 0, 2, 2]
  assert summary["points"] == 4
  with pytest.raises(flags.UsageError, match=r"--out=.*: expected the config there, got shape="):
    _run(capsys, out, *_TWO, "--queries=8")
  table = _table(capsys, tmp_path, out)
  assert {row["system"] for row in table["rows"]} == {"vllm_lmcache_like@8", "device_put@8"}
  assert len(table["rows"]) == 8
  for row in table["rows"]:
    assert row["sustained"] == (row["output_tokens_per_s"] is not None)
    assert row["reason"] or row["interpolated"]
  assert (tmp_path / "table" / "throughput_at_ttft.png").stat().st_size > 1000


def test_t_ref_is_that_of_the_command_with_the_most_isolated_requests():
  row = lambda ttft_s, **more: {"reference_ttft_s": ttft_s, **more}
  few, many = row(0.9), row(0.5, reference_requests=22)
  assert throughput_folder.reference_ttft_s([few, many, few]) == 0.5
  assert throughput_folder.reference_ttft_s([few, row(0.7)]) == pytest.approx(0.8)
  assert throughput_folder.reference_ttft_s([{"order": 0}]) is None


def _table(capsys, tmp_path, *runs):
  names = ",".join(str(run) for run in runs)
  args = [f"--runs={names}", f"--out={tmp_path / 'table'}", "--baseline=vllm_lmcache_like@8"]
  throughput_table.main(throughput_table.FLAGS.parse(args))
  table = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert table == json.loads((tmp_path / "table" / "throughput_at_ttft.json").read_text())
  return table


@pytest.mark.slow
def test_limits_of_time(tmp_path, capsys):
  one = ["--systems=vllm_lmcache_like@8", "--rates=vllm_lmcache_like@8:1000"]
  summary, rows = _run(
    capsys, tmp_path / "cut", *one, "--point_limit_s=0.02", "--initial_cache=cold"
  )
  assert rows[0]["lost"] == rows[0]["aborted"] > 0
  assert rows[0]["finished"] + rows[0]["lost"] == 9
  assert rows[0]["warmed_contexts"] == 0
  out = tmp_path / "late"
  out.mkdir()
  (out / "points.jsonl").write_text("")
  summary, rows = _run(capsys, out, *one, "--time_limit_s=1e-9")
  assert rows == []
  assert summary["not_reached"] == ["vllm_lmcache_like@8 at 1000 requests/s, repeat 0"]


@pytest.mark.slow
def test_a_search_brackets_the_target_and_goes_on_where_it_was(tmp_path, capsys):
  out = tmp_path / "run"
  search = [
    "--systems=vllm_lmcache_like@8", "--rates=vllm_lmcache_like@8:auto:100",
    "--initial_cache=cold", "--targets=2",
  ]  # fmt: skip
  summary, rows = _run(capsys, out, *search)
  assert summary["not_reached"] == []
  rates = [row["rate_rps"] for row in rows]
  assert rates[0] == 100
  assert len(rates) > 1
  target_s = 2 * summary["t_ref_s"]
  assert rate_search.next_rate(rows, 100, target_s) is None
  before = (out / "points.jsonl").read_text()
  later, _ = _run(capsys, out, *search)
  assert (out / "points.jsonl").read_text() == before
  assert later["t_ref_s"] == summary["t_ref_s"]
  assert later["costs"] == {}  # nothing was left to measure


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--systems=mine"], r"--systems: expected NAME or NAME@PAGE_SIZE .*got 'mine'"),
    (["--systems=strata@big"], r"--systems: expected NAME or NAME@PAGE_SIZE .*got 'strata@big'"),
    (["--systems=strata,strata"], r"--systems: expected each system once"),
    (["--systems=oracle_io"], r"--systems: expected systems that a machine can run"),
    (["--systems=ct_hpkv_like"], r"--systems: expected systems without a storage tier"),
    (["--systems=strata"], r"--rates: expected rates of every system, got none of strata"),
    (["--systems=strata", "--rates=other:3"], r"--rates: expected SYSTEM:RATE.*got 'other:3'"),
    (["--systems=strata", "--rates=strata:x"], r"--rates: expected numbers > 0 behind strata"),
    (["--systems=strata", "--rates=strata:0"], r"--rates: expected numbers > 0 behind strata"),
    (["--systems=strata", "--rates=strata:auto:2:3"], r"--rates: expected .* auto and one number"),
    (["--systems=strata", "--rates=strata:auto"], r"--rates: expected numbers > 0 behind strata"),
    ([*_TWO, "--targets=0"], r"--targets: expected numbers > 0"),
    ([*_TWO, "--targets=nan"], r"--targets: expected numbers > 0"),
    (["--systems=strata@0"], r"--systems: expected a page size >= 1, got strata@0"),
    (
      ["--systems=strata", "--rates=strata:2,strata:3"],
      r"--rates: expected strata once.*strata:3'",
    ),
    (["--systems=strata", "--rates=strata"], r"--rates: expected numbers > 0 behind strata"),
    ([*_TWO, "--repeats=0"], r"--repeats: expected an integer >= 1, got 0"),
    ([*_TWO, "--checked_requests=-1"], r"--checked_requests: expected an integer >= 0, got -1"),
    ([*_TWO, "--model=big"], r"--model: expected one of llama31_8b"),
    ([*_TWO, "--costs=high"], r"--costs: expected one of measured, unknown"),
    ([*_TWO, "--initial_cache=hot"], r"--initial_cache: expected one of cold, host_warm"),
    ([*_TWO, "--time_limit_s=0"], r"--time_limit_s: expected a number > 0"),
    ([*_TWO, "--point_limit_s=inf"], r"--point_limit_s: expected a finite number > 0, got inf"),
    ([*_TWO, "--contexts=0"], r"--contexts: expected an integer >= 1"),
    ([*_TWO, "--host_tokens=64"], r"--host_tokens: expected room for all contexts, .* got 64"),
    ([*_TWO, "--device_tokens=64"], r"the device pool is too small, expected --device_tokens"),
    ([*_TWO, "--context_tokens=600", "--device_tokens=2048"], r"at most 512 together"),
    ([*_TWO, "--workload=no_reuse"], r"--contexts: expected a workload of documents"),
    ([*_TWO, "--attention=hopper"], r"attention 'hopper': expected a Hopper GPU"),
    ([*_TWO, "--policy=none.py:mine"], r"policy: expected a file, got 'none.py'"),
    ([*_TWO, "--policy=fcfs"], r"--policy: expected a system with strata's policy in --systems"),
    (
      ["--systems=strata", "--rates=strata:5,strata with fcfs:x", "--policy=fcfs"],
      r"--rates: expected numbers > 0 behind strata with fcfs",
    ),
    ([*_TWO, "--once=mine"], r"--once: expected some of vllm_lmcache_like@8, .* got 'mine'"),
  ],
)
def test_what_a_user_gets_wrong_is_answered_in_one_line(arguments, message, tmp_path):
  parse = throughput.FLAGS.parse
  with pytest.raises(flags.UsageError, match=message) as raised:
    throughput.main(parse([*_TINY, f"--out={tmp_path / 'run'}", *arguments]))
  assert "\n" not in str(raised.value)
  assert not (tmp_path / "run").exists()


def test_tables_want_points_of_one_config(tmp_path):
  with pytest.raises(flags.UsageError, match="--runs: expected at least one folder"):
    throughput_table.main(throughput_table.FLAGS.parse([]))
  for name, value in (("a", 1), ("b", 2)):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "points.jsonl").write_text(json.dumps(_ROW) + "\n")
    (folder / "config.json").write_text(json.dumps({"config": {"x": value}, "commands": []}))
  runs = [f"--runs={tmp_path / 'a'},{tmp_path / 'b'}", f"--out={tmp_path / 'out'}"]
  args = throughput_table.FLAGS.parse(runs)
  with pytest.raises(flags.UsageError, match="--runs: expected folders of one config"):
    throughput_table.main(args)


_ROW = dict.fromkeys(crossing.KEPT, 1.0) | {
  "system": "a", "repeat": 0, "rate_rps": 4.0, "ttft_mean_s": 1.0, "drain_s": 0.0,
  "arrival_span_s": 9.0, "lost": 0, "reference_ttft_s": 0.1,
}  # fmt: skip


def _table_of(tmp_path, text, *argv):
  (tmp_path / "points.jsonl").write_text(text)
  (tmp_path / "config.json").write_text(json.dumps({"config": {}, "commands": []}))
  argv = (f"--runs={tmp_path}", f"--out={tmp_path / 'table'}", *argv)
  throughput_table.main(throughput_table.FLAGS.parse(argv))


@pytest.mark.parametrize(
  ("text", "argv", "message"),
  [
    (json.dumps(_ROW) + '\n{"system": "a', (), r"points\.jsonl, line 2: expected JSON"),
    (json.dumps(_ROW) + "\n[1]\n", (), r"points\.jsonl, line 2: expected an object"),
    ('{"system": "a"}\n', (), r"points\.jsonl, line 1: expected the field 'repeat', got none"),
    (json.dumps(_ROW), ("--baseline=b",), r"--baseline: expected one of a, got 'b'"),
    (json.dumps(_ROW | {"reference_ttft_s": None}), (), r"expected points with reference_ttft_s"),
  ],
)
def test_a_table_tells_what_is_wrong_and_where(text, argv, message, tmp_path):
  with pytest.raises(flags.UsageError, match=message):
    _table_of(tmp_path, text, *argv)


def test_a_row_without_a_bracket_says_what_to_do(tmp_path, capsys):
  _table_of(tmp_path, json.dumps(_ROW), "--targets=5")
  told = capsys.readouterr().err.splitlines()
  assert told == [
    "no ratios: no points of hicache_paper; --baseline takes a",
    "a    5 T_ref  -  repeat 0: not sustained at 4 requests/s, the lowest rate; add a lower one to "
    "--rates, or a:auto:4 with this target in --targets",
  ]


def test_every_repeat_begins_with_another_system_and_searches_start_where_the_last_one_ended():
  found = throughput_plan.contenders(
    ("strata@16", "hicache_paper", "strata"),
    ("strata@16:auto:20", "hicache_paper:5:4", "strata:9"),
  )
  assert [c.system.page_size for c in found] == [16, 32, 1]
  assert [c.label for c, _ in throughput_plan.order(found, 2)] == [
    "strata@16", "hicache_paper", "strata", "hicache_paper", "strata", "strata@16"
  ]  # fmt: skip
  assert [(c.label, n) for c, n in throughput_plan.order(found, 3, once=("strata",))] == [
    ("strata@16", 0), ("hicache_paper", 0), ("strata", 0), ("hicache_paper", 1), ("strata@16", 1),
    ("strata@16", 2), ("hicache_paper", 2),
  ]  # fmt: skip
  with pytest.raises(flags.UsageError, match=r"--once: expected some of strata@16, .* got 'x'"):
    throughput_plan.order(found, 2, once=("x",))
  rates = [p.rate_rps for p in throughput_plan.points(found[1], 0, [], [1.0])]
  assert rates == [4.0, 5.0]
  rows = []

  def add(rate, ttft):
    rows.append(
      {
        "system": "strata@16", "repeat": 0, "rate_rps": rate, "ttft_mean_s": ttft, "drain_s": 0.0,
        "arrival_span_s": 9.0, "lost": 0,
      }
    )  # fmt: skip

  asked = []
  for point in throughput_plan.points(found[0], 0, rows, [1.0]):
    asked.append(point.rate_rps)
    add(point.rate_rps, 0.5 if point.rate_rps < 26 else 1.5)
  assert asked == [20.0, 25.0, 31.2]
  assert next(throughput_plan.points(found[0], 1, rows, [1.0])).rate_rps == 25.0
  assert len(list(throughput_plan.points(found[0], 1, rows, [1.0]))) == 1  # not measured: no more


def test_a_policy_stands_behind_every_system_with_that_of_strata(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text(_MINE.format(seen=str(tmp_path / "seen")))

  def found(*rates):
    return [
      (c.label, c.system.name, c.system.page_size, c.policy_name, c.rates_rps, c.searches)
      for c in throughput_plan.contenders(
        ("strata@16", "hicache_paper", "strata_auto"),
        ("strata@16:auto:20", "hicache_paper:4", "strata_auto:8:9", *rates), f"{file}:mine",
      )
    ]  # fmt: skip

  spec, own = f"{file}:mine", "strata_auto with mine.py:mine"
  assert found() == [
    ("strata@16", "strata", 16, "strata", (20.0,), True),
    ("strata@16 with mine.py:mine", "strata", 16, spec, (20.0,), True),
    ("hicache_paper", "hicache_paper", 32, "fcfs", (4.0,), False),
    ("strata_auto", "strata_auto", 32, "strata", (8.0, 9.0), False),
    (own, "strata_auto", 32, spec, (8.0, 9.0), False),
  ]
  assert found(f"{own}:7")[-2:] == [
    ("strata_auto", "strata_auto", 32, "strata", (8.0, 9.0), False),
    (own, "strata_auto", 32, spec, (7.0,), False),
  ]
  again = throughput_plan.contender_of(own, spec)
  assert (again.label, again.policy, again.system.name) == (own, spec, "strata_auto")
  assert throughput_plan.contender_of("strata@16", "strata").policy is None


@pytest.mark.slow
def test_a_policy_of_ones_own_is_served_beside_strata_and_known_by_its_text(tmp_path, capsys):
  out, file, seen = tmp_path / "run", tmp_path / "mine.py", tmp_path / "seen"
  file.write_text(_MINE.format(seen=str(seen)))
  asked = ["--systems=strata@8", "--rates=strata@8:40", f"--policy={file}:mine"]
  _, rows = _run(capsys, out, *asked)
  assert [row["system"] for row in rows] == ["strata@8", "strata@8 with mine.py:mine"]
  assert [row["policy"] for row in rows] == ["strata", f"{file}:mine"]
  assert rows[0]["policy_digest"] is None
  assert rows[1]["warmed_contexts"] == 0  # they share what is on the host
  assert rows[1]["finished"] == 9
  assert len(seen.read_text().splitlines()) >= rows[1]["plans"]  # it decided, and was shown costs
  assert min(map(float, seen.read_text().splitlines())) > 0.0

  before = (out / "points.jsonl").read_text()
  _run(capsys, out, *asked)
  assert (out / "points.jsonl").read_text() == before
  moved = tmp_path / "elsewhere" / "mine.py"
  moved.parent.mkdir()
  moved.write_text(file.read_text() + "# another text\n")
  config = (out / "config.json").read_text()
  with pytest.raises(flags.UsageError, match=r"--policy: expected the text that served strata@8 "):
    _run(capsys, out, *asked[:2], f"--policy={moved}:mine")
  assert (out / "config.json").read_text() == config
  _, rows = _run(capsys, out, *asked, "--rates=strata@8:40,strata@8 with mine.py:mine:50")
  assert [(r["system"], r["rate_rps"]) for r in rows[2:]] == [("strata@8 with mine.py:mine", 50.0)]

  throughput_table.main(
    throughput_table.FLAGS.parse([f"--runs={out}", f"--out={tmp_path}", "--baseline=strata@8"])
  )
  captured = capsys.readouterr()
  table = json.loads(captured.out.splitlines()[-1])
  assert {row["system"] for row in table["rows"]} == {"strata@8", "strata@8 with mine.py:mine"}
  lines = [line for line in captured.err.splitlines() if " T_ref  " in line]
  assert len({line.index(" T_ref  ") for line in lines}) == 1  # in columns


def test_points_have_tokens_of_their_own():
  first = throughput_plan.Point(label="a", rate_rps=4.0, repeat=0)
  assert first.seed == throughput_plan.Point(label="a", rate_rps=4.0, repeat=0).seed
  others = [
    throughput_plan.Point(label="b", rate_rps=4.0, repeat=0),
    throughput_plan.Point(label="a", rate_rps=5.0, repeat=0),
    throughput_plan.Point(label="a", rate_rps=4.0, repeat=1),
  ]
  assert len({first.seed, *(point.seed for point in others)}) == 4


def test_a_point_is_expected_to_take_as_long_as_its_arrivals_or_the_system():
  point = throughput_plan.Point(label="a", rate_rps=50.0, repeat=0)
  row = {"system": "a", "lost": 0, "requests_per_s": 10.0}
  assert throughput_plan.expected_s(point, 110, []) == 2.2
  assert throughput_plan.expected_s(point, 110, [row]) == pytest.approx(10.0)
  slower = throughput_plan.Point(label="a", rate_rps=5.0, repeat=0)
  assert throughput_plan.expected_s(slower, 110, [row]) == 22.0
  for other in ({**row, "system": "b"}, {**row, "lost": 1}, {**row, "requests_per_s": None}):
    assert throughput_plan.expected_s(point, 110, [other]) == 2.2
