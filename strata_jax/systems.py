"""Systems: a cache, a scheduler and ways to move pages, together under one name.

A preset stands for a published or public system, at the level of its decisions and data paths:
`source`, `version` and `not_modelled` say what it follows and where it stops. "?" marks what public
sources do not confirm. All presets share budgets, chunk size, attention, the device prefix cache
and decode. `*_like`: foreign systems, re-told in this design space.
"""

import dataclasses
import math

from strata_jax import validation
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import POLICIES, policy_config

IO_BACKENDS = (
  "none",
  "kernel",
  "copy_engine",
  "memcpy_async",
  "memcpy_batch",
  "device_put",
  "auto",
)
OVERLAPS = ("none", "whole", "layer")
IDEALS = ("none", "free_loads", "all_on_device", "no_reuse")
STORES = ("none", "private", "shared")
WRITES = ("none", "write_through", "write_through_selective", "write_back")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemConfig:
  """A system: what it caches where, how it moves pages, how it schedules.

  `policy` names the composition (`strata_jax.scheduler.policies.POLICIES`); it sets its fields over
  `scheduler`: take `scheduler_config` for what really runs.
  """

  name: str
  description: str = ""
  source: str = ""
  version: str = ""
  not_modelled: str = ""

  # Tiers
  page_size: int = 1
  host: bool = True
  storage: str = "none"  # "private": this instance's; "shared": every instance's
  prefix_cache: bool = True
  write_policy: str = "write_through"
  selective_threshold: int = 2
  cache_outputs: bool = True  # the KV of generated tokens stays in the cache
  host_chunk_tokens: int = 0  # host pages are kept in whole chunks of this; 0: page by page

  # I/O
  load_backend: str = "kernel"
  store_backend: str = "kernel"
  separate_kv_copies: bool = False  # K and V of a (page, layer) are two copies
  capped_blocks: bool = True  # the kernel uses few blocks; else as many as it likes
  overlap: str = "layer"  # compute waits for its layer's load, the whole load, or overlaps nothing
  load_is_free: bool = False

  # Storage prefetch
  min_prefetch_tokens: int = 0
  prefetch_timeout_s: float = math.inf  # at most this
  prefetch_timeout_base_s: float = math.inf  # and at most this
  prefetch_timeout_s_per_1024_tokens: float = 0.0  # plus this a 1,024 tokens

  # Scheduling
  policy: str = "strata"
  scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
  min_load_tokens: int = 0  # shorter host hits are computed again

  ideal: str = "none"  # a bound instead of a system: what it makes free

  def __post_init__(self) -> None:
    validation.check_int(self, "page_size", minimum=1)
    validation.check_choice(self, "storage", STORES)
    validation.check_choice(self, "write_policy", WRITES)
    validation.check_int(self, "selective_threshold", minimum=1)
    validation.check_int(self, "host_chunk_tokens", minimum=0)
    validation.check_choice(self, "load_backend", IO_BACKENDS)
    validation.check_choice(self, "store_backend", IO_BACKENDS)
    validation.check_choice(self, "overlap", OVERLAPS)
    for field in ("min_load_tokens", "min_prefetch_tokens"):
      validation.check_int(self, field, minimum=0)
    for field in (
      "prefetch_timeout_s",
      "prefetch_timeout_base_s",
      "prefetch_timeout_s_per_1024_tokens",
    ):
      validation.check_number(self, field, minimum=0.0)
    validation.check_choice(self, "policy", tuple(POLICIES))
    validation.check_choice(self, "ideal", IDEALS)
    if self.host_chunk_tokens % self.page_size:
      validation.fail(
        self, "host_chunk_tokens", f"a multiple of page_size={self.page_size}",
        self.host_chunk_tokens,
      )  # fmt: skip
    if not self.host and self.load_backend != "none":
      validation.fail(self, "load_backend", "none without a host tier", self.load_backend)

  @property
  def scheduler_config(self) -> SchedulerConfig:
    """The scheduler's config with what the policy sets and how this system's loads overlap."""
    config = policy_config(self.policy, self.scheduler)
    return dataclasses.replace(
      config, layerwise=self.overlap == "layer", min_load_tokens=self.min_load_tokens
    )

  @property
  def tiers(self) -> tuple[str, ...]:
    """From fastest to slowest."""
    return (
      "device",
      *(("host",) if self.host else ()),
      *(("storage",) if self.storage != "none" else ()),
    )


def prefetch_timeout_s(system: SystemConfig, tokens: int) -> float:
  """Seconds that a prefetch of `tokens` may take: min(limit, base + tokens / 1024 * slope)."""
  slope_s = system.prefetch_timeout_s_per_1024_tokens * tokens / 1024
  return min(system.prefetch_timeout_s, system.prefetch_timeout_base_s + slope_s)
