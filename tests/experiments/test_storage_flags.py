"""The tiers of a run by flags."""

import pytest

from experiments import flags, storage_flags
from strata_jax.config import CacheConfig


def choose(*arguments: str, **cache):
  program = flags.FlagSet("")
  program.add_flag("out", str, "runs/x", "")
  storage_flags.add(program)
  args = program.parse(list(arguments))
  return storage_flags.choose(args, CacheConfig(**cache))


def test_without_flags_there_is_no_storage():
  cache, storage = choose()
  assert cache == CacheConfig()
  assert storage is None


def test_device_alone_has_no_host():
  cache, storage = choose("--tiers=device")
  assert cache.host_tokens == 0
  assert storage is None


def test_host():
  cache, storage = choose("--tiers=host")
  assert cache.host_tokens > 0
  assert storage is None


def test_local_storage_is_in_the_run_folder_unless_named():
  assert choose("--tiers=local")[1].url == "runs/x/store"
  assert choose("--tiers=local", "--store=/disk")[1].url == "/disk"


@pytest.mark.parametrize("tiers", [(), ("--tiers=shared",)])
def test_shared_storage(tiers):
  _, storage = choose(
    *tiers, "--store=s3://bucket/kv/", "--store_capacity_bytes=1000", "--min_prefetch_tokens=64"
  )
  assert storage.url == "s3://bucket/kv/"
  assert storage.capacity_bytes == 1000
  assert storage.config.min_prefetch_tokens == 64


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--tiers=cloud"], "expected one of device, host, local, shared, got 'cloud'"),
    (["--tiers=shared"], "--tiers=shared: expected --store"),
    (["--tiers=host", "--store=/disk"], "--tiers=host: expected no --store"),
    (["--prefetch=never"], "--prefetch: expected one of best_effort"),
    (["--costs=free"], "--costs: expected one of auto, measured, unknown, got 'free'"),
    (["--min_prefetch_tokens=0"], "min_prefetch_tokens: expected an integer >= 1, got 0"),
  ],
)
def test_contradictions_are_one_line(arguments, message):
  with pytest.raises(flags.UsageError) as error:
    choose(*arguments)
  assert message in str(error.value)


def test_storage_needs_a_host():
  with pytest.raises(flags.UsageError, match="expected a host tier"):
    choose("--store=/disk", host_tokens=0)


def test_opening(tmp_path):
  _, storage = choose(f"--store={tmp_path / 's'}")
  store = storage.open(page_bytes=64, fingerprint="model")
  assert store.page_bytes == 64
  store.close()
  (tmp_path / "file").touch()
  for url in (str(tmp_path / "file"), "nosuch://x/"):
    with pytest.raises(flags.UsageError, match="store"):
      choose(f"--store={url}")[1].open(page_bytes=64, fingerprint="model")
