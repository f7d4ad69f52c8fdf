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
    "--host_tokens=2048", "--min_prefetch_tokens=16", "--ttft_visits=2", f"--out={tmp_path}",
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
