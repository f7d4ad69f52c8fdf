"""Flags of the storage tier: the tiers of a run, its store, what is read and written when."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from experiments import flags
from strata_jax.config import CacheConfig, StorageConfig
from strata_jax.scheduler.config import PREFETCH_WAITS
from strata_jax.tiers import page_store

TIERS = ("device", "host", "local", "shared")
COSTS = ("auto", "measured", "unknown")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageChoice:
  """The storage tier that the user asked for."""

  url: str
  capacity_bytes: int | None
  config: StorageConfig

  def open(self, *, page_bytes: int, fingerprint: str) -> page_store.PageStore:
    """Opens the store. Raises UsageError."""
    with flags.usage_errors():
      return page_store.open_store(
        self.url,
        page_bytes=page_bytes,
        fingerprint=fingerprint,
        capacity_bytes=self.capacity_bytes,
      )


def add(program: flags.FlagSet, defaults: Mapping[str, Any] | None = None) -> None:
  """Adds the flags. `defaults`: those that differ from the fields of StorageConfig."""
  program.add_flag(
    "tiers", str | None, None,
    "device; host: and host memory; local: and a store of this run's own, in --out unless --store "
    "says where; shared: and --store, which other runs use too. Else as the other flags say",
  )  # fmt: skip
  program.add_flag(
    "store", str | None, None,
    "storage below the host: a folder, memory://, or a URL or JSON object of TensorStore",
  )  # fmt: skip
  program.add_flag("store_capacity_bytes", int | None, None, "room in the store; none: no limit")
  program.add_flag(
    "prefetch", str | None, None,
    f"how long a request waits for storage: {', '.join(PREFETCH_WAITS)}; none: as the system does",
  )  # fmt: skip
  program.add_flag(
    "costs", str, "auto",
    "seconds of compute, loads and reads that the policy may weigh. measured: timed before the "
    "run; unknown: none; auto: measured for a --policy of FILE.py:NAME or module:NAME, and where "
    "prefetches wait or loads are chosen by cost; else unknown",
  )  # fmt: skip
  program.add(StorageConfig, defaults=defaults)


def choose(args: flags.Args, cache: CacheConfig) -> tuple[CacheConfig, StorageChoice | None]:
  """The cache with the tiers that were asked for, and the storage tier, if any.

  Raises:
    UsageError: flags that contradict each other.
  """
  tiers, url = args.tiers, args.store
  if tiers is not None and tiers not in TIERS:
    raise flags.UsageError(f"--tiers: expected one of {', '.join(TIERS)}, got {tiers!r}")
  if args.prefetch is not None and args.prefetch not in PREFETCH_WAITS:
    raise flags.UsageError(
      f"--prefetch: expected one of {', '.join(PREFETCH_WAITS)}, got {args.prefetch!r}"
    )
  if args.costs not in COSTS:
    raise flags.UsageError(f"--costs: expected one of {', '.join(COSTS)}, got {args.costs!r}")
  if tiers in ("device", "host") and url:
    raise flags.UsageError(f"--tiers={tiers}: expected no --store, got {url!r}")
  if tiers == "shared" and not url:
    raise flags.UsageError("--tiers=shared: expected --store, which other runs use too")
  if tiers == "device":
    cache = dataclasses.replace(cache, host_tokens=0)
  if tiers == "local":
    url = url or os.path.join(args.out, "store")
  config = args.config(StorageConfig)
  if not url:
    return cache, None
  if not cache.host_pages:
    raise flags.UsageError("--store: expected a host tier above it, got --host_tokens=0")
  return cache, StorageChoice(url=url, capacity_bytes=args.store_capacity_bytes, config=config)
