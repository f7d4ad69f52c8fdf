import gzip
import json

import pytest
from jax import profiler

from experiments import flags, timeline, timeline_plot, trace_events, trace_profile, trace_summary
from experiments.timeline_scenarios import TimelineConfig
from experiments.trace_events import Event
from experiments.trace_profile import Raw

_HOST, _GPU = "/host:CPU", "/device:GPU:0"


def _annotation(name, start_us, end_us, **stats):
  return Raw(_HOST, "python", name, start_us, end_us, stats)


def _scenario(start_us, end_us, name="kernel/layer"):
  stats = {"scenario": name, "copy_bytes": 4096, "unprofiled_step_ms": 0.5}
  return _annotation(trace_profile.SCENARIO, start_us, end_us, **stats)


def _launch(start_us, end_us, **stats):
  return _annotation(trace_profile.LAUNCH, start_us, end_us, **stats)


def _kernel(name, start_us, end_us, *, line="Stream #13(Compute)", **stats):
  return Raw(_GPU, line, name, start_us, end_us, stats)


def _two_steps():
  """Two prefills: loads 10-60 and 110-130, compute 30-90 and 120-190."""
  return [
    _scenario(0, 200),
    _launch(0, 40, step_id=7, prefills=1, load_tokens=64),
    _annotation(trace_profile.WAIT, 40, 95),
    _launch(100, 140, step_id=8, prefills=1),
    _annotation(trace_profile.WAIT, 140, 195),
    _kernel("move_fragments_kernel", 10, 60, line="Stream #15(Compute)"),
    _kernel("nvjet_hsh_128x256", 30, 70, hlo_module="jit_layer", program_id=1),
    _kernel("cudnn_generated_fort_native_sdpa_sm90", 60, 90, hlo_module="jit_layer", program_id=1),
    _kernel("MemcpyH2D", 110, 130, line="Stream #16(MemcpyH2D)"),
    _kernel("nvjet_hsh_128x256", 120, 190, hlo_module="jit_layer", program_id=1),
    Raw(_GPU, "XLA Ops", "fusion.derived", 0, 200, {}),  # a line made from the others
    _kernel("nvjet_hsh_128x256", 300, 400),  # after the scenario
  ]


def test_unions_of_intervals():
  merged = trace_events.union([(5, 7), (0, 2), (1, 3), (7, 8), (9, 8)])
  assert merged == [(0, 3), (5, 8)]
  assert trace_events.total_us(merged) == 6
  assert trace_events.union([(0, 1), (2, 3), (5, 6)], gap_us=1) == [(0, 3), (5, 6)]


def test_what_is_in_both_and_what_is_left():
  first, second = [(0, 4), (6, 10)], [(1, 2), (3, 7), (9, 12)]
  assert trace_events.both(first, second) == [(1, 2), (3, 4), (6, 7), (9, 10)]
  assert trace_events.both(second, first) == trace_events.both(first, second)
  assert trace_events.rest_of((0, 12), first) == [(4, 6), (10, 12)]
  assert trace_events.rest_of((1, 3), first) == []
  assert trace_events.rest_of((-1, 1), []) == [(-1, 1)]


def test_a_summary_of_known_intervals():
  (scenario,) = trace_profile.scenarios(_two_steps())
  row = trace_summary.summarize(scenario)
  us = {key: value * 1e3 for key, value in row.items() if key.endswith("_ms") and value is not None}
  assert row["scenario"] == "kernel/layer"
  assert row["traced_steps"] == 2
  assert us["step_ms"] == pytest.approx(100)
  assert us["launch_ms"] == pytest.approx(40)
  assert us["load_busy_ms"] == pytest.approx(50 + 20)
  assert us["compute_busy_ms"] == pytest.approx(60 + 70)
  assert us["gemm_ms"] == pytest.approx(40 + 70)
  assert us["attention_ms"] == pytest.approx(30)
  assert us["load_overlap_ms"] == pytest.approx(30 + 10)
  assert row["load_overlap_share"] == pytest.approx(40 / 70)
  assert row["backup_overlap_share"] is None
  # The device runs 10-90 and 110-190.
  assert row["launch_hidden_share"] == pytest.approx((30 + 30) / 80)
  assert us["between_steps_ms"] == pytest.approx(20)
  assert us["device_idle_ms"] == pytest.approx(40)
  assert us["idle_host_waits_ms"] == pytest.approx(5 + 5)
  assert us["idle_host_busy_ms"] == pytest.approx(30)
  assert us["unprofiled_step_ms"] == pytest.approx(500)


def test_a_load_that_nothing_covers():
  raws = [
    _scenario(0, 100),
    _launch(0, 10, prefills=1),
    _kernel("move_fragments_kernel", 10, 40),
    _kernel("gemm", 40, 90),
  ]
  (scenario,) = trace_profile.scenarios(raws)
  assert trace_summary.summarize(scenario)["load_overlap_share"] == 0


@pytest.mark.parametrize(
  ("name", "stats", "lane"),
  [
    ("move_fragments_kernel", {"hlo_module": "jit__layer_beside_load"}, trace_events.LOADS),
    ("move_fragments_kernel", {"hlo_module": "jit_store_fragments"}, trace_events.BACKUPS),
    ("move_fragments_kernel", {"hlo_module": "jit_store_round"}, trace_events.BACKUPS),
    ("custom_call", {"hlo_op": "move_fragments.1"}, trace_events.LOADS),
    ("sort", {"hlo_module": "jit_load_fragments"}, trace_events.LOADS),
    ("loop_fusion", {"hlo_module": "jit_load_layer"}, trace_events.LOADS),
    ("loop_fusion", {"hlo_module": "jit__layer_beside_load"}, trace_events.OTHER),
    ("loop_fusion", {"hlo_module": "jit_layer_after_load"}, trace_events.OTHER),
    ("nvjet_hsh_128x256", {"hlo_module": "jit_layer"}, trace_events.GEMM),
    ("gemm_fusion_dot_3", {}, trace_events.GEMM),
    ("dot.3", {"hlo_op": "dot.3"}, trace_events.GEMM),
    ("cudnn_sdpa_flash_fprop_wgmma", {}, trace_events.ATTENTION),
    ("something_new", {}, trace_events.OTHER),
    ("MemcpyH2D", {}, trace_events.LOADS),
    ("MemcpyH2D", {"memcpy_details": "kind_src:pinned size:65536 dest:0"}, trace_events.LOADS),
    ("MemcpyH2D", {"memcpy_details": "kind_src:pageable size:4 dest:0"}, trace_events.SMALL),
    ("MemcpyD2H", {"memcpy_details": "size:2097152"}, trace_events.BACKUPS),
    ("MemcpyD2H", {"memcpy_details": "size:64"}, trace_events.SMALL),
    ("MemcpyD2D", {"memcpy_details": "size:2097152"}, trace_events.OTHER),
    (
      "MemcpyOther",
      {"memcpy_details": "kind_src:pinned kind_dst:device size:65536"},
      trace_events.LOADS,
    ),
    (
      "MemcpyOther",
      {"memcpy_details": "kind_src:device kind_dst:pinned size:65536"},
      trace_events.BACKUPS,
    ),
  ],
)
def test_lanes_of_device_events(name, stats, lane):
  assert trace_profile.lane_of(_kernel(name, 0, 1, **stats), copy_bytes=4096) == lane


def test_decodes_are_told_from_prefills_of_the_same_step():
  layer = lambda program_id: {"hlo_module": "jit_layer", "program_id": program_id}
  raws = [
    _scenario(0, 400, "serving"),
    _launch(0, 10, prefills=1),
    _kernel("gemm", 20, 30, **layer(1)),
    _launch(100, 110, decodes=2),
    _kernel("gemm", 120, 130, **layer(2)),
    _launch(200, 205),  # loads alone: no step of its own
    _launch(300, 310, prefills=1, decodes=2),
    _kernel("gemm", 320, 330, **layer(1)),
    _kernel("gemm", 330, 340, **layer(2)),
    _kernel("move_fragments_kernel", 330, 340, **layer(2)),
  ]
  (scenario,) = trace_profile.scenarios(raws)
  assert [(s.start_us, s.end_us) for s in scenario.steps] == [(0, 100), (100, 300), (300, 400)]
  decode = trace_events.on_lanes(scenario.events, [trace_events.DECODE])
  assert decode == [(120, 130), (330, 340)]
  assert trace_events.on_lanes(scenario.events, [trace_events.GEMM]) == [(20, 30), (320, 330)]
  assert trace_events.on_lanes(scenario.events, [trace_events.LOADS]) == [(330, 340)]


def test_the_rest_of_the_host_thread_is_the_loop():
  (scenario,) = trace_profile.scenarios(_two_steps())
  loop = trace_events.on_lanes(scenario.events, [trace_events.LOOP])
  assert loop == [(95, 100), (195, 200)]


def test_a_chrome_trace(tmp_path):
  (scenario,) = trace_profile.scenarios(_two_steps())
  crossing = Event(trace_events.LOADS, "another", 50, 80, {})
  path = tmp_path / "trace.json.gz"
  trace_events.write_chrome_trace(path, [*scenario.events, crossing], scenario.marks, "title")
  value = json.loads(gzip.decompress(path.read_bytes()))
  rows = value["traceEvents"]
  named = {
    (row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"
  }
  events = [row for row in rows if row["ph"] == "X"]
  assert len(events) == len(scenario.events) + 1 + len(scenario.marks)
  assert all(row["ts"] >= 0 and row["dur"] >= 0 for row in events)
  lanes = {}
  for row in events:
    lanes.setdefault(named[row["pid"], row["tid"]], []).append(row)
  assert [(row["ts"], row["dur"]) for row in lanes["loads"]] == [(10, 50), (110, 20)]
  assert [row["name"] for row in lanes["loads (2)"]] == ["another"]
  assert [row["name"] for row in lanes["step"]] == ["step 7", "step 8"]
  assert [row["name"] for row in lanes["host launch"]] == ["step 7 launch", "step 8 launch"]


_XSPACE = """
planes {
  name: "/host:CPU"
  lines { name: "python" timestamp_ns: 0
    events { metadata_id: 1 offset_ps: 0 duration_ps: 100000000
             stats { metadata_id: 1 str_value: "backup" } } }
  event_metadata { key: 1 value { id: 1 name: "strata scenario" } }
  stat_metadata { key: 1 value { id: 1 name: "scenario" } }
}
planes {
  name: "/device:GPU:0"
  lines { name: "Stream #20(MemcpyD2H)" timestamp_ns: 0
    events { metadata_id: 1 offset_ps: 20000000 duration_ps: 10000000 } }
  event_metadata { key: 1 value { id: 1 name: "MemcpyD2H" } }
}
"""


def test_a_profile_file_is_read(tmp_path):
  data = profiler.ProfileData.text_proto_to_serialized_xspace(_XSPACE)
  (tmp_path / "plain.xplane.pb").write_bytes(data)
  (tmp_path / "packed.xplane.pb.gz").write_bytes(gzip.compress(data))
  raws = trace_profile.read(tmp_path / "plain.xplane.pb")
  assert raws == trace_profile.read(tmp_path / "packed.xplane.pb.gz")
  (scenario,) = trace_profile.scenarios(raws)
  assert scenario.name == "backup"
  assert trace_events.on_lanes(scenario.events, [trace_events.BACKUPS]) == [(20, 30)]
  text = trace_profile.describe(raws)
  assert "line 'Stream #20(MemcpyD2H)': 1 events, 0.010 ms, from 0.020 to 0.030 ms" in text
  assert "backups" in text


def test_profiles_that_are_none(tmp_path):
  path = tmp_path / "some.xplane.pb"
  path.write_bytes(b"no profile")
  with pytest.raises(ValueError, match=r"expected a profile \(.xplane.pb\)"):
    trace_profile.read(path)
  with pytest.raises(ValueError, match="expected annotations"):
    trace_profile.scenarios([_kernel("gemm", 0, 1)])
  with pytest.raises(flags.UsageError, match=r"some\.xplane\.pb"):
    timeline.main(timeline.FLAGS.parse([f"--from_profile={path}"]))


def test_a_panel_for_every_scenario():
  pytest.importorskip("matplotlib")
  raws = _two_steps()
  raws += [_scenario(250, 500, "other"), _launch(290, 300, prefills=1)]
  found = trace_profile.scenarios(raws)
  rows = [trace_summary.summarize(scenario) for scenario in found]
  figure = timeline_plot.make_figure(found, rows, "title", most_steps=6)
  assert [panel.get_title(loc="left").split(",")[0] for panel in figure.axes] == [
    "kernel/layer",
    "other",
  ]
  labels = [[text.get_text() for text in panel.get_yticklabels()] for panel in figure.axes]
  assert labels == [["host", "compute", "loads"], ["host", "compute"]]
  assert all(len(panel.collections) >= 2 for panel in figure.axes)
  assert figure.axes[0].get_xlim() == (0, 0.2)


def test_long_scenarios_are_cut_where_they_load():
  raws = [_scenario(0, 1000)]
  raws += [_launch(100 * n, 100 * n + 10, prefills=1, load_tokens=n == 4) for n in range(10)]
  (scenario,) = trace_profile.scenarios(raws)
  assert timeline_plot.shown(scenario, most_steps=3) == (400, 700)
  assert timeline_plot.shown(scenario, most_steps=8) == (200, 1000)
  assert timeline_plot.shown(scenario, most_steps=10) == (0, 1000)
  raws = [_scenario(-50, 1000), _launch(-40, -30, load_tokens=64)]  # a load alone
  raws += [_launch(100 * n, 100 * n + 10, prefills=1) for n in range(10)]
  (scenario,) = trace_profile.scenarios(raws)
  assert timeline_plot.shown(scenario, most_steps=3) == (-50, 300)


@pytest.mark.parametrize(
  ("fields", "expected"),
  [
    ({"scenarios": ("whole",)}, "scenarios: expected names as in"),
    ({"model": "gpt"}, "model: expected one of"),
    ({"documents": 1}, "documents: expected"),
    ({"steps": 0}, "steps: expected"),
  ],
)
def test_refused_configs(fields, expected):
  with pytest.raises(ValueError, match=expected):
    TimelineConfig(**fields)


@pytest.mark.slow
def test_a_tiny_model_is_traced(tmp_path, capsys):
  names = ["auto/whole", "bubble", "backup", "serving"]
  out = tmp_path / "run"
  timeline.main(
    timeline.FLAGS.parse([f"--out={out}", f"--scenarios={','.join(names)}", "--steps=2"])
  )
  summary = json.loads(capsys.readouterr().out.splitlines()[-1])
  rows = {row["scenario"]: row for row in summary["scenarios"]}
  assert list(rows) == names
  for name, row in rows.items():
    assert row["compute_busy_ms"] > 0
    assert row["step_ms"] > row["launch_ms"] > 0
    assert row["unprofiled_step_ms"] > 0
    assert name == "serving" or row["traced_steps"] == 2
  assert all(rows[name]["load_busy_ms"] > 0 for name in ("auto/whole", "bubble", "serving"))
  assert rows["backup"]["backup_busy_ms"] > 0
  assert rows["bubble"]["decode_ms"] == pytest.approx(rows["bubble"]["compute_busy_ms"])
  assert 0 < rows["serving"]["decode_ms"] < rows["serving"]["compute_busy_ms"]
  files = {path.name for path in out.iterdir()}
  assert files >= {"config.json", "summary.json", "lines.txt", "trace.json.gz"}
  assert len(files) <= 8
  assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")

  config = (out / "config.json").read_bytes()
  before = {name: (out / name).read_bytes() for name in ("timeline.png", "trace.json.gz")}
  profile = out / "profile.xplane.pb.gz"
  timeline.main(timeline.FLAGS.parse([f"--from_profile={profile}"]))
  assert json.loads(capsys.readouterr().out.splitlines()[-1]) == summary
  assert (out / "config.json").read_bytes() == config
  for name, data in before.items():
    assert (out / name).read_bytes() == data
