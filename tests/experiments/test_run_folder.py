import dataclasses
import io
import json
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest

from experiments import run_folder


@dataclasses.dataclass(frozen=True)
class _Config:
  size: int = 3
  share: float = float("inf")


class _Row(NamedTuple):
  name: str
  value: float


def test_config_json_says_everything(tmp_path):
  out = run_folder.open_run(tmp_path / "a" / "b", {"cache": _Config(), "seed": 5})
  config = json.loads((out / "config.json").read_text())
  assert config["config"] == {"cache": {"size": 3, "share": None}, "seed": 5}
  assert config["seed"] == 5
  assert config["versions"]["python"].startswith("3.")
  assert config["versions"]["numpy"] == np.__version__
  assert isinstance(config["command"], list)
  assert "git_sha" in config
  assert "device_kind" in config


def test_files_of_an_earlier_run_do_not_stay(tmp_path):
  out = run_folder.open_run(tmp_path, {})
  run_folder.write_jsonl(out / "steps.jsonl", [{"a": 1}])
  run_folder.open_run(tmp_path, {})
  assert not (tmp_path / "steps.jsonl").exists()


def test_the_summary_is_the_last_line_of_standard_output(tmp_path, capsys):
  print("something else")
  run_folder.finish(tmp_path, {"a": np.float32(0.5), "b": float("nan"), "c": np.arange(2)})
  expected = {"a": 0.5, "b": None, "c": [0, 1]}
  assert json.loads(capsys.readouterr().out.splitlines()[-1]) == expected
  assert json.loads((tmp_path / "summary.json").read_text()) == expected


def test_rows_are_json_lines(tmp_path):
  rows = [_Row("a", 1.0), {"b": {2, 1}}, _Row("c", float("nan")), {"d": np.int32(3)}]
  run_folder.write_jsonl(tmp_path / "rows.jsonl", rows)
  lines = (tmp_path / "rows.jsonl").read_text().splitlines()
  assert [json.loads(line) for line in lines] == [
    {"name": "a", "value": 1.0},
    {"b": [1, 2]},
    {"name": "c", "value": None},
    {"d": 3},
  ]


def test_a_file_in_the_way_is_an_error(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(OSError, match="file"):
    run_folder.open_run(tmp_path / "file", {})


def test_jax_is_not_imported_only_to_name_its_device():
  code = (
    "import sys; from experiments import run_folder; "
    "print(run_folder.device_kind(), 'jax' in sys.modules)"
  )
  answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert answer.stdout == "None False\n"


def test_git_sha_is_null_without_a_repository(monkeypatch, tmp_path):
  monkeypatch.setattr(run_folder, "_SOURCE", tmp_path)
  monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
  assert run_folder.git_sha() is None


class _Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


def test_a_terminal_gets_one_line_that_is_redrawn():
  stream = _Terminal()
  with run_folder.Progress(4, "work", stream=stream) as progress:
    progress.update(4, "done")
  text = stream.getvalue()
  assert text.startswith("\rwork [##############################] 4/4")
  assert text.endswith("\n")
  assert text.count("\n") == 1


def test_a_file_gets_whole_lines_and_not_one_an_update():
  stream = io.StringIO()
  with run_folder.Progress(100, "work", stream=stream) as progress:
    for done in range(101):
      progress.update(done)
  assert stream.getvalue().startswith("work [######")
  assert stream.getvalue().count("\n") == 1
