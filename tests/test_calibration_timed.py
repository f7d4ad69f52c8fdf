import dataclasses
import json

import pytest

from strata_jax import calibrated_profile, calibration_points, simulation
from strata_jax import profile as profiles
from strata_jax.calibration import Calibration
from strata_jax.calibration_found import Fitted, Found
from strata_jax.calibration_timed import TimedLoads, with_timed
from strata_jax.cost_model import BACKENDS, OVERLAPS, CostModel, IoConfig

BASE = profiles.load("h200_llama31_8b")
KERNEL = IoConfig(page_size=32)
PAPER = IoConfig(page_size=32, load_backend="memcpy_async", separate_kv_copies=True)
PAPER_POINT = "load.memcpy_async@65536"  # 32 tokens of K, or V, of one layer
TOKEN_BYTES = BASE.kv_bytes_token


def timed(label="paper", io=PAPER, gbps=(16.0,), **fields):
  seconds = {command: TOKEN_BYTES / (rate * 1e9) for command, rate in enumerate(gbps)}
  return TimedLoads(label=label, io=io, load_s_per_token=seconds, **fields)


def put(*systems, fitted_io=KERNEL, found=None):
  found = found or Calibration(profile=BASE, fitted={}, kept={}, residuals={})
  return with_timed(found, fitted_io, systems, "RUN")


def rate(found, io):
  return CostModel(found.profile, io).load_rate / 1e9


@pytest.mark.parametrize(
  ("io", "key"),
  [
    (PAPER, PAPER_POINT),
    (dataclasses.replace(PAPER, separate_kv_copies=False), "load.memcpy_async@131072"),
    (dataclasses.replace(PAPER, page_size=16), "load.memcpy_async@32768"),
    (IoConfig(page_size=32, load_backend="device_put"), "load.device_put@4.1943e+06"),
    (
      IoConfig(page_size=32, load_backend="copy_engine", overlap="whole"),
      "load.copy_engine@4.1943e+06",
    ),
    (IoConfig(page_size=16, load_backend="memcpy_batch"), "load.memcpy_batch@65536"),
    (dataclasses.replace(KERNEL, page_size=8), "load.kernel.2@32768"),
    (dataclasses.replace(KERNEL, capped_blocks=False), "load.kernel.8@131072"),
  ],
)
def test_the_rate_is_put_where_the_costs_read_it(io, key):
  base_rate = CostModel(BASE, io).load_rate
  found = put(timed(io=io, gbps=(12.5,)))
  assert rate(found, io) == pytest.approx(12.5)
  assert base_rate != pytest.approx(12.5e9)
  assert set(found.fitted) == {key}
  assert not found.kept
  # The fitted system's own stays, and so do all other tables.
  assert rate(found, KERNEL) == CostModel(BASE, KERNEL).load_rate / 1e9
  others = {name: table for name, table in found.profile.load.copies.items() if name not in key}
  assert others == {name: BASE.load.copies[name] for name in others}


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_points_are_those_that_the_costs_read(backend, page_size, overlap):
  """A rate that is put at the points is read back, above and below that of the base."""
  io = IoConfig(page_size=page_size, load_backend=backend, overlap=overlap)
  points = calibration_points.load_points(io, BASE)
  # Small fragments by `auto` are the kernel's as long as that is no slower than the driver.
  for gbps in (54.0,) if backend == "auto" and len(points) == 1 else (2.0, 54.0):
    found = Found(BASE)
    found.put_load_rate(gbps * 1e9, io, 9)
    assert CostModel(found.profile, io).load_rate == pytest.approx(gbps * 1e9)
    assert set(found.fitted) == {point.key for point in points}
  none = IoConfig(page_size=page_size, load_backend="none")
  assert calibration_points.load_points(none, BASE) == ()


def test_commands_give_their_median_and_systems_that_share_a_point_one_number():
  found = put(timed("a", gbps=(10.0, 15.0, 16.0)), timed("b", gbps=(10.0, 15.0, 16.0)))
  one = found.fitted[PAPER_POINT]
  assert one.value == pytest.approx(15.0)
  assert (one.steps, one.size_bytes) == (0, 65536)
  assert one.source == "timed loads of 3 commands of RUN before serving, a and b"
  # Others than the first one's count as much: none overwrites another.
  found = put(timed("a", gbps=(10.0,)), timed("b", gbps=(12.0, 15.0)))
  assert rate(found, PAPER) == pytest.approx(12.0)
  assert found.fitted[PAPER_POINT].source.startswith("timed loads of 2 commands of RUN")


def test_two_sizes_of_one_back_end_are_two_points():
  """Beside a third one of the same table that is the fitted system's."""
  small = dataclasses.replace(PAPER, page_size=16)
  fit = Found(BASE)
  large = dataclasses.replace(PAPER, page_size=48)
  fit.put_load_rate(31.7e9, large, 30)
  before = Calibration(profile=fit.profile, fitted={}, kept={}, residuals={})
  found = put(timed("a"), timed("b", small, (7.0,)), fitted_io=large, found=before)
  assert rate(found, large) == pytest.approx(31.7)
  assert rate(found, PAPER) == pytest.approx(16.0)
  assert rate(found, small) == pytest.approx(7.0)
  assert set(found.fitted) == {PAPER_POINT, "load.memcpy_async@32768"}


def test_what_the_fit_told_stays():
  """The fitted system's own timed loads, and those of a system that reads at the same point."""
  auto = dataclasses.replace(KERNEL, load_backend="auto")
  batch = IoConfig(page_size=32, load_backend="memcpy_batch")
  fit = Found(BASE)
  fit.put_load_rate(51e9, auto, 30)
  before = Calibration(profile=fit.profile, fitted=fit.fitted, kept=fit.kept, residuals={})
  found = put(
    timed("auto", auto, (27.0,)), timed("batch", batch, (40.0,)), timed("paper"),
    fitted_io=auto, found=before,
  )  # fmt: skip
  assert [rate(found, auto), rate(found, batch)] == pytest.approx([51.0, 51.0])
  assert rate(found, PAPER) == pytest.approx(16.0)
  assert set(found.fitted) == {*fit.fitted, PAPER_POINT}
  assert found.kept == {
    "load.memcpy_batch@131072": "timed loads of batch not taken: the loads of the fitted steps "
    "tell it"
  }


def test_a_point_that_would_change_the_fitted_rate_is_not_taken():
  """By interpolation: the fitted system's rate is the base's, between two points of its table."""
  fitted_io = dataclasses.replace(PAPER, page_size=24)
  found = put(timed(), fitted_io=fitted_io)
  assert found.profile == BASE
  assert "the fitted system's rate would change" in found.kept[PAPER_POINT]


@pytest.mark.parametrize(
  ("one", "why"),
  [
    (timed(gbps=()), "paper has no measured costs of loads"),
    (timed(io=dataclasses.replace(KERNEL, load_backend="auto")), "in another way than parked"),
    (
      timed(io=IoConfig(page_size=32, load_backend="memcpy_batch", overlap="whole")),
      "copies whole pages, the table holds fragments",
    ),
    (
      timed(io=IoConfig(page_size=32, load_backend="copy_engine")),
      "copies fragments, the table holds whole pages",
    ),
    (timed(served_by="reference"), "paper was served by reference"),
    (timed(gbps=(70.0,)), r"paper: 70.0 GB/s, but the link has 55.5 at most"),
  ],
)
def test_what_does_not_stand_for_serving_is_kept_with_a_reason(one, why):
  fitted_io = dataclasses.replace(PAPER, page_size=1)
  found = put(one, fitted_io=fitted_io)
  assert found.profile == BASE
  assert not found.fitted
  (reason,) = found.kept.values()
  assert why in reason


def test_one_that_stands_is_taken_beside_one_that_does_not():
  found = put(timed("a", gbps=(10.0,), served_by="reference"), timed("b", gbps=(12.0,)))
  assert rate(found, PAPER) == pytest.approx(12.0)
  assert found.fitted[PAPER_POINT].source.endswith("before serving, b")
  assert put(timed(served_by="memcpy_async")).fitted
  assert put(timed(io=dataclasses.replace(PAPER, load_is_free=True))).profile == BASE


def test_the_written_table_says_where_each_point_is_from(tmp_path):
  small = dataclasses.replace(PAPER, page_size=16)
  plain = Calibration(
    profile=BASE, kept={}, residuals={},
    fitted={"hardware.gate_s": Fitted(value=BASE.hardware.gate_s, steps=9)},
  )  # fmt: skip
  found = put(timed("a"), timed("b", small, (7.0,)), found=plain)
  calibrated_profile.write(
    found, base="h200_llama31_8b", name="mine", out=tmp_path, source="the steps of X"
  )
  loaded = simulation.find_profile("mine", "llama31_8b", tmp_path)
  assert loaded.load == found.profile.load
  leaf = json.loads((tmp_path / "hardware_mine.json").read_text())["load"]["memcpy_async"]
  assert leaf["kind"] == "measured"
  for text in (
    "the point at 65536 bytes timed loads of 1 command of RUN before serving, a",
    "the point at 32768 bytes timed loads of 1 command of RUN before serving, b",
    BASE.sources["load.memcpy_async"]["source"],
  ):
    assert leaf["source"].count(text) == 1
  assert "the steps of X" not in leaf["source"]
  assert loaded.sources["hardware.gate_s"]["source"] == "fitted to 9 steps of the steps of X"
