"""Serve, stop, start again: two real processes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from experiments import restart

_TINY = ("--weights=random", "--model=tiny", "--documents=2", "--document_tokens=100")


@pytest.mark.slow
def test_a_new_process_finds_everything_in_storage(tmp_path):
  command = [
    sys.executable, "-m", "experiments.restart", "--weights=random", "--model=tiny",
    "--documents=3", "--document_tokens=150", "--page_size=4", "--device_tokens=512",
    "--host_tokens=2048", "--ttft_visits=2", f"--out={tmp_path}",
  ]  # fmt: skip
  done = subprocess.run(
    command, capture_output=True, text=True, check=False, timeout=600,
    cwd=pathlib.Path(__file__).resolve().parents[2], env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  summary = json.loads(done.stdout.splitlines()[-1])
  assert summary["outputs_identical"] is True
  assert summary["storage_hit_tokens"] > 0.4 * summary["prompt_tokens"]
  assert summary["computed_tokens_again"] < 0.1 * summary["computed_tokens_first"]
  assert summary["ttft_ratio"] == pytest.approx(
    summary["ttft_storage_s"] / summary["ttft_recompute_s"]
  )
  assert summary["stored_pages"] > 50
  assert json.loads((tmp_path / "summary.json").read_text()) == summary
  assert (tmp_path / "again" / "requests.jsonl").exists()


def test_what_cannot_be_is_one_line():
  for arguments, message in (
    (["--phase=third"], "--phase: expected one of first, again"),
    (["--phase=first", "--tiers=host", *_TINY], "expected a store"),
  ):
    with pytest.raises(restart.flags.UsageError, match=message):
      restart.main(restart.FLAGS.parse(arguments))


def test_it_says_when_nothing_is_long_enough_to_be_read(tmp_path, monkeypatch, capsys):
  names = ("ttft_storage_s", "ttft_recompute_s", "prompt_tokens", "computed_tokens", "stored_bytes")
  summary = dict.fromkeys(names, 1) | {"stored_pages": 12, "storage_hit_tokens": 0}

  def process(command, **_):
    folder = tmp_path / command[-1].removeprefix("--phase=")
    folder.mkdir()
    (folder / "requests.jsonl").write_text("")
    return subprocess.CompletedProcess(command, 0, stdout=json.dumps(summary))

  monkeypatch.setattr(restart.subprocess, "run", process)
  restart.main(restart.FLAGS.parse([f"--out={tmp_path}", "--min_prefetch_tokens=256"]))
  told = capsys.readouterr().err
  assert "nothing was read from the 12 pages stored" in told
  assert "--min_prefetch_tokens=256" in told
