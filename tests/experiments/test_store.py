"""The store command: inspect, verify, compact, clear."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from experiments import store as program
from strata_jax.tiers import page_store
from strata_jax.tiers.faulty_store import damage
from tests.tiers.store_pages import keys_of, pages_of

PAGE_BYTES = 512


@pytest.fixture(params=["segments", "values"])
def url(request, tmp_path) -> str:
  """A store with the pages of two models."""
  url = str(tmp_path / "store") if request.param == "segments" else f"file://{tmp_path}/store/"
  for name, count in (("model", 20), ("other", 7)):
    write(url, keys_of(name, count), fingerprint=name)
  return url


def write(url: str, keys: list[bytes], fingerprint: str = "model") -> None:
  store = page_store.open_store(url, page_bytes=PAGE_BYTES, fingerprint=fingerprint)
  store.write(keys, pages_of(keys, PAGE_BYTES))
  store.close()


def run(capsys, verb: str, url: str) -> tuple[int, dict]:
  """Status and summary."""
  status = program.main(program.FLAGS.parse([f"--verb={verb}", f"--store={url}"]))
  return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_inspect_counts_what_every_model_has(capsys, url):
  status, summary = run(capsys, "inspect", url)
  assert status == 0
  assert summary["pages"] == 27
  assert sorted(holding["pages"] for holding in summary["holdings"]) == [7, 20]
  assert {holding["page_bytes"] for holding in summary["holdings"]} == {PAGE_BYTES}
  assert summary["bytes"] >= 27 * PAGE_BYTES
  assert summary["bad_pages"] == 0
  if not url.startswith("file"):
    assert {holding["fingerprint"] for holding in summary["holdings"]} == {"model", "other"}


def test_verify_finds_bad_pages_and_takes_them_out(capsys, url):
  assert run(capsys, "verify", url) == (0, run(capsys, "inspect", url)[1])
  store = page_store.open_store(url, page_bytes=PAGE_BYTES, fingerprint="model")
  for key in keys_of("model", 3):
    damage(store, key, "flip")
  store.close()
  status, summary = run(capsys, "verify", url)
  assert status == 1
  assert summary["bad_pages"] == 3
  status, summary = run(capsys, "verify", url)
  assert status == 0
  assert summary["pages"] == 24


def test_compact_gives_space_back(capsys, url):
  keys = keys_of("model", 20)
  for key in keys_of("more", 6):
    write(url, [key])
  store = page_store.open_store(url, page_bytes=PAGE_BYTES, fingerprint="model")
  store.delete(keys[:10])
  store.close()
  before = run(capsys, "inspect", url)[1]
  after = run(capsys, "compact", url)[1]
  assert after["pages"] == before["pages"] == 23
  assert after["bytes"] <= before["bytes"]
  if not url.startswith("file"):
    assert after["bytes"] < before["bytes"]
    assert sum(holding["segments"] for holding in after["holdings"]) == 2
    assert sum(holding["dead_pages"] for holding in after["holdings"]) == 0


def test_clear_leaves_nothing(capsys, url):
  status, summary = run(capsys, "clear", url)
  assert status == 0
  assert summary["pages"] == summary["bytes"] == 0
  assert summary["holdings"] == []


def test_leftovers_are_counted(capsys, tmp_path):
  write(str(tmp_path / "s"), keys_of("a", 1))
  (tmp_path / "s" / "segments" / "0123456789ab-00000001.orbax-checkpoint-tmp").mkdir()
  assert run(capsys, "inspect", str(tmp_path / "s"))[1]["leftovers"] == 1


def command(*arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-m", "experiments.store", *arguments],
    capture_output=True, text=True, check=False, timeout=120,
    cwd=pathlib.Path(__file__).resolve().parents[2], env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )  # fmt: skip


@pytest.mark.slow
def test_the_verb_stands_first(tmp_path):
  write(str(tmp_path / "s"), keys_of("a", 3))
  done = command("inspect", f"--store={tmp_path / 's'}")
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout.splitlines()[-1])["pages"] == 3
  done = command("explode", f"--store={tmp_path / 's'}")
  assert done.returncode == 2
  assert "expected one of inspect, verify, compact, clear, got 'explode'" in done.stderr


@pytest.mark.parametrize(
  "url", [None, "memory://", "/no/such/place", "file:///no/such/", "nosuch://x/"]
)
def test_a_store_that_is_not_there_is_one_line(url):
  arguments = ["--verb=inspect"] + ([f"--store={url}"] if url else [])
  with pytest.raises(program.flags.UsageError, match="store"):
    program.main(program.FLAGS.parse(arguments))
