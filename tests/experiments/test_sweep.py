import dataclasses
import json
import math
import sys

import pytest

from experiments import flags, sweep
from experiments.sweeps import SWEEPS, ablation, statistics, tables, throughput, throughput_at_ttft
from experiments.sweeps import case as cases
from experiments.sweeps.case import Case, Point
from experiments.sweeps.types import Options

# A sweep of two systems on so few requests that a test can afford it.
TINY = """
from experiments.sweeps import tables, throughput
from experiments.sweeps.case import Case
from experiments.sweeps.types import Sweep

def cells(options):
  variants = {name: Case(system=name, workload="no_reuse", initial_cache="cold")
              for name in ("recompute", "sglang_device")}
  return tables.cells(options, variants, seeds=2, targets=(5.0,))

SWEEP = Sweep(
  name="tiny", about="", cells=cells, measure=throughput.measure,
  table=lambda options, found: tables.rows(found, "recompute", target=5.0),
  plot=tables.plot_ratios,
)
"""


def run(tmp_path, capsys, *argv):
  sweep.main(sweep.FLAGS.parse([f"--out={tmp_path / 'out'}", "--workers=1", *argv]))
  return json.loads(capsys.readouterr().out.splitlines()[-1])


def point(rate, ttft, *, drain=0.0, lost=0, given_up=False):
  return Point(
    rate_rps=rate, ttft_mean_s=ttft, given_up=given_up, drain_s=drain, span_s=100.0, lost=lost,
    summary={"output_tokens_per_s": rate},
  )  # fmt: skip


def test_a_sweep_from_a_file_is_measured_once_and_resumed(tmp_path, capsys, monkeypatch):
  (tmp_path / "tiny.py").write_text(TINY)
  argv = [f"--name={tmp_path / 'tiny.py'}", "--limit=40"]
  first = run(tmp_path, capsys, *argv)
  assert first["cells"] == 4
  assert [row["label"] for row in first["rows"]] == ["recompute", "sglang_device"]
  assert first["rows"][1]["ratio_to_baseline"] == pytest.approx(1.0, abs=0.02)  # nothing to reuse
  assert first["rows"][1]["verdict"] == "not distinguishable"
  assert (tmp_path / "out" / "tiny.png").exists()

  def never(*unused):
    raise AssertionError("a cell was measured again")

  monkeypatch.setattr(sweep.concurrent.futures.ProcessPoolExecutor, "submit", never)
  second = run(tmp_path, capsys, *argv)
  assert second["rows"] == first["rows"]
  (tmp_path / "tiny.py").write_text(TINY + "\n# measured in another way\n")
  with pytest.raises(AssertionError, match="measured again"):
    run(tmp_path, capsys, *argv)


@pytest.mark.parametrize("name", sorted(SWEEPS))
@pytest.mark.parametrize("quick", [False, True])
def test_every_sweep_declares_distinct_cells_of_plain_values(name, quick):
  configs = SWEEPS[name].cells(Options(quick=quick))
  assert len({sweep.cell_key(name, config) for config in configs}) == len(configs) > 0
  for config in configs:
    Case(**config["case"])  # every field is one of a case


@pytest.mark.parametrize(
  ("limit", "expected"), [(37.0, 37.0), (3.3, 3.3), (1e9, 4 * 20.0), (0.01, None)]
)
def test_the_search_finds_the_highest_sustained_rate_to_2_percent(monkeypatch, limit, expected):
  runs = []

  def fake(case, rate, give_up_ttft_s=None):
    runs.append(rate)
    return point(rate, 1.0 if rate <= limit else 9.0)

  monkeypatch.setattr(cases, "run", fake)
  search = throughput._Search(Case(system="strata"), 20.0)
  found = search.highest(5.0)
  assert search.brackets(5.0) is (0.1 < limit < 100.0)
  assert len(runs) == len(set(runs)) < 15
  if expected is None:
    assert found is None
  else:
    assert expected / 1.25 <= found.rate_rps <= expected
    if expected < 79:
      assert found.rate_rps >= expected / 1.02


def test_targets_share_their_runs(monkeypatch):
  runs = []

  def fake(case, rate, give_up_ttft_s=None):
    runs.append(rate)
    return point(rate, rate)

  monkeypatch.setattr(cases, "run", fake)
  search = throughput._Search(Case(system="strata"), 20.0)
  assert search.highest(30.0).rate_rps == pytest.approx(30.0, rel=0.02)
  before = len(runs)
  assert search.highest(22.0).rate_rps == pytest.approx(22.0, rel=0.02)
  assert len(runs) - before <= 5


def test_what_a_point_must_keep_to_be_sustained():
  assert point(1.0, 5.0).sustains(5.0)
  assert not point(1.0, 5.01).sustains(5.0)
  assert not point(1.0, 1.0, lost=1).sustains(5.0)
  assert not point(1.0, 1.0, given_up=True).sustains(5.0)
  assert point(1.0, 1.0, drain=15.0).sustains(5.0)
  assert not point(1.0, 1.0, drain=15.1).sustains(5.0)
  assert point(1.0, 0.1, drain=5.0).sustains(0.1)  # 5 % of the span


def test_a_hopeless_run_is_given_up_and_a_fair_one_is_not():
  case = Case(system="hicache_paper", workload="no_reuse", initial_cache="cold", limit=120)
  assert cases.run(case, 1000.0, give_up_ttft_s=0.5).given_up
  whole = cases.run(case, 1000.0)
  kept = cases.run(case, 1000.0, give_up_ttft_s=whole.ttft_mean_s)
  assert not kept.given_up
  assert kept.summary["ttft_mean_s"] == whole.summary["ttft_mean_s"] > 0.5


def test_the_variants_of_the_ablation():
  variants = ablation.variants()
  assert variants["none"] == ()
  assert variants["all"] == (
    "io", "deferral", "balance", "bundle", "bubble", "rolling", "joining"
  )  # fmt: skip
  assert variants["all but bubble"] == (
    "io", "deferral", "balance", "bundle", "rolling", "joining"
  )  # fmt: skip
  for name in variants["all"]:
    assert variants[f"{name} alone"] == (name,)
    assert name not in variants[f"all but {name}"]
  nothing = cases._setup(ablation.case_with(())).system
  baseline = cases._setup(Case(system="hicache_paper")).system
  assert nothing.page_size == baseline.page_size == 32
  for field in ("load_backend", "store_backend", "separate_kv_copies", "overlap"):
    assert getattr(nothing, field) == getattr(baseline, field)
  for field in ("deferral", "balance", "bundles", "bubble_filling", "order"):
    assert getattr(nothing.scheduler_config, field) == getattr(baseline.scheduler_config, field)
  assert cases._setup(ablation.case_with(ablation.MECHANISMS)).system.name == "strata"


def test_with_every_mechanism_off_the_run_is_the_baselines():
  fields = {"limit": 60, "seed": 3}
  off = cases.run(ablation.case_with((), **fields), None)
  baseline = cases.run(Case(system="hicache_paper", **fields), None)
  assert off.summary == baseline.summary


def test_rows_are_paired_by_seed():
  def cell(label, seed, value, target="5"):
    at = {target: None if value is None else {"output_tokens_per_s": value, "ttft_mean_s": 1.0}}
    measured = {"at": at, "peak_output_tokens_per_s": 9.0, "reference_ttft_s": 1.0}
    return {"label": label, "case": {"seed": seed}}, measured

  found = [cell("hicache_paper", 0, 10.0), cell("hicache_paper", 1, 20.0)]
  found += [cell("strata", 0, 30.0), cell("strata", 1, 62.0)]
  found += [cell("oracle_io", 0, 40.0), cell("oracle_io", 1, 62.0)]
  found += [cell("trtllm_like", 0, None), cell("trtllm_like", 1, 5.0)]
  rows = {row["system"]: row for row in throughput_at_ttft.SWEEP.table(Options(), found)}
  assert rows["strata"]["ratio_to_baseline"] == pytest.approx((3.0 + 3.1) / 2)
  assert rows["strata"]["fraction_of_oracle"] == pytest.approx((0.75 + 1.0) / 2)
  assert rows["strata"]["best_baseline"] == "hicache_paper"
  assert rows["trtllm_like"]["ratio_to_baseline"] is None
  assert rows["trtllm_like"]["output_tokens_per_s"] is None
  assert rows["hicache_paper"]["verdict"] == "not distinguishable"
  low, high = rows["strata"]["ci95"]
  assert low < 3.05 < high


def test_rows_whose_fastest_rate_stays_below_the_target_are_told():
  def cell(label, seed, bracketed):
    at = {"output_tokens_per_s": 10.0, "ttft_mean_s": 1.0, "bracketed": bracketed}
    measured = {"at": {"5": at}, "peak_output_tokens_per_s": 9.0, "reference_ttft_s": 1.0}
    return {"label": label, "case": {"seed": seed}}, measured

  found = [cell("hicache_paper", seed, True) for seed in (0, 1)]
  found += [cell("strata", 0, True), cell("strata", 1, False)]
  rows = {row["system"]: row["verdict"] for row in throughput_at_ttft.SWEEP.table(Options(), found)}
  assert rows == {
    "hicache_paper": "not distinguishable",
    "strata": "not distinguishable; mean TTFT below the target",
  }


def test_statistics():
  assert statistics.mean([]) is None
  assert statistics.half_width_95([1.0]) is None
  # Five values, Student's t with 4 degrees of freedom.
  values = [1.0, 2.0, 3.0, 4.0, 5.0]
  assert statistics.half_width_95(values) == pytest.approx(2.776 * math.sqrt(2.5 / 5))
  assert statistics.paired_ratios([1.0, None], [1.0, 1.0]) is None
  assert statistics.noise_floor([10.0, 10.0, 10.0]) == 0.0
  assert statistics.noise_floor([10.0, 11.0, 12.0]) > 0.1
  assert tables.verdict(1.05, 0.01, 0.08) == "not distinguishable"
  assert tables.verdict(1.05, 0.01, 0.03) == "gain"
  assert tables.verdict(0.9, 0.01, None) == "loss"


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["--name=none"], r"--name: expected FILE\.py or one of throughput_at_ttft"),
    (["--workers=0"], "--workers: expected"),
    (["--policy=none.py:x"], "policy: expected a file"),
    (["--policy=other"], "policy: expected one of"),
    (["--workload=other"], "--workload: expected one of loogle_like"),
    (["--model=other"], "hardware, model: expected .* got 'h200' and 'other'"),
    (["--systems=strata,other"], "system: expected one of"),
    (["--seeds=-1"], "--seeds: expected an integer >= 0"),
    (["--limit=-1"], "--limit: expected an integer >= 0"),
    (["--targets=5,0"], "--targets: expected numbers > 0"),
    (["--name=ablation", "--systems=strata"], "--systems: expected none with --name=ablation"),
    (["--name=hardware", "--model=x"], "--model: expected none with --name=hardware"),
    (["--name=page_size", "--policy=fcfs"], "--policy: expected a sweep with rows of strata"),
  ],
)
def test_mistakes_get_one_line(tmp_path, argv, message):
  with pytest.raises(flags.UsageError, match=message):
    sweep.main(sweep.FLAGS.parse([f"--out={tmp_path}", *argv]))


POLICY = """
import dataclasses
from strata_jax.scheduler.policies import schedule

def mine(view, config):
  return schedule(view, dataclasses.replace(config, order="shortest_load"))
"""


def with_own_policy(tmp_path, **fields):
  (tmp_path / "own.py").write_text(POLICY)
  return Options(policy=f"{tmp_path / 'own.py'}:mine", **fields)


@pytest.mark.parametrize(
  ("name", "labels"),
  [
    ("throughput_at_ttft", {"strata with own.py:mine"}),
    ("ablation", {f"{o}: all with own.py:mine" for o in ("adjacent", "shuffled", "spread")}),
    ("load_ratio", {"strata with own.py:mine"}),
    ("threshold_ratio_threshold", {f"{x} with own.py:mine" for x in (1, 10, 100, 1000, "inf")}),
  ],
)
def test_an_own_policy_has_rows_beside_those_of_strata(tmp_path, name, labels):
  options = with_own_policy(tmp_path)
  own = [cell for cell in SWEEPS[name].cells(options) if cell["case"]["policy"]]
  assert {cell["label"] for cell in own} == labels
  assert {cell["case"]["policy"] for cell in own} == {options.policy}
  beside = {cell["label"] for cell in SWEEPS[name].cells(options)} - labels
  assert beside == {cell["label"] for cell in SWEEPS[name].cells(Options())}


def test_an_own_policy_is_what_its_row_measures(tmp_path, capsys):
  (tmp_path / "own.py").write_text(POLICY)
  rows = run(
    tmp_path, capsys, "--name=load_ratio", f"--policy={tmp_path / 'own.py'}:mine",
    "--systems=strata", "--limit=150",
  )["rows"]  # fmt: skip
  assert [row["label"] for row in rows] == ["strata", "strata with own.py:mine"]
  assert rows[0]["batches"] != rows[1]["batches"]


def test_a_changed_policy_is_measured_again(tmp_path):
  options = with_own_policy(tmp_path)
  config = tables.cells(options, {"strata": Case(system="strata")}, seeds=1)[-1]
  before = sweep.cell_key("s", config)
  assert sweep.cell_key("s", config) == before
  (tmp_path / "own.py").write_text(POLICY.replace("shortest_load", "longest_prefix"))
  sweep.policy_source.cache_clear()
  assert sweep.cell_key("s", config) != before


def test_the_text_of_a_policy_that_is_an_object(tmp_path, monkeypatch):
  text = f"import functools\n{POLICY}\nobject_ = functools.partial(mine)\n"
  (tmp_path / "own_objects.py").write_text(text)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "own_objects", raising=False)
  for place in (tmp_path / "own_objects.py", "own_objects"):
    assert sweep.policy_source(f"{place}:object_") == text
  del sys.modules["own_objects"]


def test_a_policy_is_no_baseline(tmp_path):
  def cell(label, value):
    at = {"5": {"output_tokens_per_s": value, "ttft_mean_s": 1.0}}
    measured = {"at": at, "peak_output_tokens_per_s": 9.0, "reference_ttft_s": 1.0}
    return {"label": label, "case": {"seed": 0}}, measured

  found = [cell("hicache_paper", 10.0), cell("strata", 30.0), cell("strata with own.py:f", 40.0)]
  rows = {row["system"]: row for row in throughput_at_ttft.SWEEP.table(Options(), found)}
  assert rows["strata"]["best_baseline"] == "hicache_paper"
  assert rows["strata with own.py:f"]["ratio_to_best_baseline"] == 4.0


@pytest.mark.slow
def test_what_mechanisms_gain_on_loogle_like_in_a_closed_loop():
  def rate(case):
    return cases.run(dataclasses.replace(case, limit=400), None).summary["output_tokens_per_s"]

  systems = ("hicache_paper", "hicache_batch", "strata_io", "strata_schedule_only", "strata")
  paper, batch, io, scheduling, strata = (rate(Case(system=name)) for name in systems)
  assert strata > 2.5 * paper
  assert strata > 1.2 * batch
  assert io > 1.2 * paper
  assert scheduling > 1.2 * paper
  assert strata < 1.01 * rate(Case(system="oracle_io"))
  for name in ("bubble", "rolling", "joining"):
    rest = [other for other in ablation.MECHANISMS if other != name]
    assert strata > 1.02 * rate(ablation.case_with(rest)), name
  adjacent = {"workload": "loogle_like_adjacent", "initial_cache": "cold"}
  rest = [other for other in ablation.MECHANISMS if other != "deferral"]
  assert rate(Case(system="strata", **adjacent)) > 1.05 * rate(ablation.case_with(rest, **adjacent))


def test_thresholds_of_deferral_are_swept_where_there_are_delay_hits():
  cells = SWEEPS["threshold_deferral_threshold_tokens"].cells(Options(limit=60, seeds=1))
  deferred = {
    cell["label"]: cases.run(Case(**cell["case"]), None).summary["deferred"] for cell in cells
  }
  assert deferred["100"] > 0 == deferred["inf"]
