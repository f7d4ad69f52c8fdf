import importlib

import pytest

from experiments import plots
from strata_jax.metrics import RequestRecord

PNG = b"\x89PNG"


def records(count):
  return [
    RequestRecord(
      request_id=i, prompt_tokens=10, outcome="finished", arrival_s=float(i), dispatched_s=i + 0.1,
      admitted_s=i + 0.2, first_token_s=i + 0.5, over_s=i + 1.0, stall_s=0.1, compute_s=0.2,
    )
    for i in range(count)
  ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_waterfalls_of_few_and_many_requests(tmp_path, count):
  plots.waterfall(tmp_path / "w.png", records(count))
  assert (tmp_path / "w.png").read_bytes().startswith(PNG)


def test_no_request_gives_no_plot(tmp_path):
  plots.waterfall(tmp_path / "w.png", [])
  assert not (tmp_path / "w.png").exists()


def test_bars_leave_out_what_is_unknown_and_lines_take_a_log_axis(tmp_path):
  plots.bars(tmp_path / "b.png", {"a": 1.0, "b": None}, "x")
  plots.lines(tmp_path / "l.png", {"a": ([1.0, 10.0], [0.0, 1.0])}, "x", "y", log_x=True)
  for name in ("b.png", "l.png"):
    assert (tmp_path / name).read_bytes().startswith(PNG)


def test_without_matplotlib_a_line_says_so(tmp_path, monkeypatch, capsys):
  def missing(name, *rest):
    raise ImportError(name)

  monkeypatch.setattr(importlib, "import_module", missing)
  plots.bars(tmp_path / "b.png", {"a": 1.0}, "x")
  assert "matplotlib is not installed" in capsys.readouterr().err
  assert not (tmp_path / "b.png").exists()
