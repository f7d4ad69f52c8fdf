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

  ideal: str = "none"  # a bound instead of a system: what it makes free

  def __post_init__(self) -> None:
    validation.check_int(self, "page_size", minimum=1)
    validation.check_choice(self, "storage", STORES)
    validation.check_choice(self, "write_policy", WRITES)
    validation.check_int(self, "selective_threshold", minimum=1)
    validation.check_choice(self, "load_backend", IO_BACKENDS)
    validation.check_choice(self, "store_backend", IO_BACKENDS)
    validation.check_choice(self, "overlap", OVERLAPS)
    validation.check_int(self, "min_prefetch_tokens", minimum=0)
    for field in (
      "prefetch_timeout_s",
      "prefetch_timeout_base_s",
      "prefetch_timeout_s_per_1024_tokens",
    ):
      validation.check_number(self, field, minimum=0.0)
    validation.check_choice(self, "policy", tuple(POLICIES))
    validation.check_choice(self, "ideal", IDEALS)
    if not self.host and self.load_backend != "none":
      validation.fail(self, "load_backend", "none without a host tier", self.load_backend)

  @property
  def scheduler_config(self) -> SchedulerConfig:
    """The scheduler's config with what the policy sets and how this system's loads overlap."""
    config = policy_config(self.policy, self.scheduler)
    return dataclasses.replace(config, layerwise=self.overlap == "layer")

  @property
  def tiers(self) -> tuple[str, ...]:
    """From fastest to slowest."""
    return (
      "device",
      *(("host",) if self.host else ()),
      *(("storage",) if self.storage != "none" else ()),
    )


_FCFS = "fcfs"
_LPM = "longest_prefix"
_PAPER = "Xie et al., Strata, OSDI 2026 (arXiv 2508.18572)"
_SGLANG = "SGLang (github.com/sgl-project/sglang), python/sglang/srt/managers/schedule_policy.py"
_HICACHE = "SGLang HiCache (python/sglang/srt/mem_cache, managers/cache_controller.py)"
_SKIPS = "a request that does not fit is passed over at most max_bypasses times, not waited for"


def _lpm(system: SystemConfig, *, policy: str = _LPM) -> SystemConfig:
  """The same system with longest prefix match; SGLang falls back to FCFS above 128 waiting."""
  return dataclasses.replace(
    system,
    name=f"{system.name}_lpm",
    description=f"{system.description}; longest prefix match",
    policy=policy,
    scheduler=dataclasses.replace(system.scheduler, order_max_waiting=128),
  )


def _paged(system: SystemConfig, page_size: int) -> SystemConfig:
  """The same system with another page size."""
  return dataclasses.replace(
    system,
    name=f"{system.name}_{page_size}",
    description=f"{system.description}; page size {page_size}",
    page_size=page_size,
  )


_paged_attention = SystemConfig(
  name="paged_attention", description="Paged device memory with prefix reuse, no lower tier",
  source="vLLM (Kwon et al., SOSP 2023); block size 16 is its default", version="0.x",
  not_modelled=f"swapping to host memory; {_SKIPS}",
  page_size=16, host=False, write_policy="none", load_backend="none", store_backend="none",
  overlap="none", policy=_FCFS,
)  # fmt: skip
_sglang_device = SystemConfig(
  name="sglang_device", description="Radix tree on the device only, page size 1",
  source=_SGLANG, version="0.4-0.5", not_modelled=f"cache-aware routing; {_SKIPS}",
  page_size=1, host=False, write_policy="none", load_backend="none", store_backend="none",
  overlap="none", policy=_FCFS,
)  # fmt: skip
_hicache_paper = SystemConfig(
  name="hicache_paper", description="The Strata paper's baseline: page copies by the driver",
  source=f"{_PAPER}, its SGLang-HiCache baseline", version="as described in the paper",
  not_modelled=_SKIPS,
  page_size=32, load_backend="memcpy_async", store_backend="memcpy_async", separate_kv_copies=True,
  overlap="layer", policy=_FCFS,
)  # fmt: skip
_hicache_batch = SystemConfig(
  name="hicache_batch", description="The strong baseline: one cudaMemcpyBatchAsync a layer",
  source="CUDA 12.8+ cudaMemcpyBatchAsync under HiCache's pages; measured, not published",
  version="1", not_modelled=_SKIPS,
  page_size=32, load_backend="memcpy_batch", store_backend="memcpy_batch", overlap="layer",
  policy=_FCFS,
)  # fmt: skip
_device_put = SystemConfig(
  name="device_put", description="HiCache's pages moved by jax.device_put, one after the other",
  source="what JAX offers without kernels and CUDA; measured, not published", version="1",
  not_modelled=f"that its calls hold up whoever launches; {_SKIPS}",
  page_size=32, load_backend="device_put", store_backend="device_put", overlap="whole",
  policy=_FCFS,
)  # fmt: skip
_hicache_today_like = SystemConfig(
  name="hicache_today_like", description="Public HiCache: kernel loads, staged batch write-back",
  source=f"{_HICACHE}; {_SGLANG}", version="0.5 (2025)",
  not_modelled=f"its storage back ends' own costs; tensor parallel synchronisation; {_SKIPS}",
  page_size=1, load_backend="kernel", store_backend="copy_engine", overlap="layer",
  min_prefetch_tokens=256, prefetch_timeout_s=30.0, prefetch_timeout_base_s=2.0,
  prefetch_timeout_s_per_1024_tokens=0.1, policy=_FCFS,
  scheduler=SchedulerConfig(min_load_tokens=10, prefetch="timeout"),
)  # fmt: skip
_vllm_lmcache_like = SystemConfig(
  name="vllm_lmcache_like", description="LMCache: kernel without a cap, whole load first",
  source="LMCache (github.com/LMCache/LMCache) with vLLM's KV connector", version="0.3",
  not_modelled="host chunks of 256 tokens (pages of 32 are kept and hit); that it drops the KV of "
  "generated tokens; its asynchronous and layer-wise modes; CPU time of its Python path; "
  + _SKIPS,
  page_size=32, load_backend="kernel", store_backend="kernel",
  capped_blocks=False, overlap="whole", policy=_FCFS,
)  # fmt: skip
_trtllm_like = SystemConfig(
  name="trtllm_like", description="TensorRT-LLM's host offload: written when evicted",
  source="TensorRT-LLM documentation, KV cache reuse and host offload", version="1.0",
  not_modelled="priority LRU with retention times (plain LRU, as all blocks have priority 35 by "
  "default); whether loads overlap compute is not confirmed (?): whole load first; " + _SKIPS,
  page_size=32, load_backend="kernel", store_backend="kernel", capped_blocks=False,
  overlap="whole", write_policy="write_back", policy=_FCFS,
)  # fmt: skip
_ct_hpkv_like = SystemConfig(
  name="ct_hpkv_like", description="Three tiers matched top-down, mixed hits, pulled if cheaper",
  source="public descriptions of a hierarchical prefix KV cache with asynchronous pulls (?)",
  version="?",
  not_modelled="its write path (?): write-through; pull order and overlap (?): whole load first; "
  + _SKIPS,
  page_size=16, storage="private", load_backend="memcpy_batch", store_backend="memcpy_batch",
  overlap="whole", min_prefetch_tokens=1024, policy=_FCFS,
  scheduler=SchedulerConfig(
    min_load_tokens=1024, load_or_compute="cheaper", prefetch="wait_complete"
  ),
)  # fmt: skip
_mooncake_like = SystemConfig(
  name="mooncake_like", description="A shared store of 512-token blocks; illustrative",
  source="Qin et al., Mooncake, FAST 2025; block size from its traces", version="paper",
  not_modelled="disaggregated prefill and decode, RDMA transfer engine, its global scheduler; "
  "waiting for the whole prefetch and layer-wise loads are assumed (?); " + _SKIPS,
  page_size=512, storage="shared", load_backend="memcpy_batch", store_backend="memcpy_batch",
  overlap="layer", policy=_FCFS, scheduler=SchedulerConfig(prefetch="wait_complete"),
)  # fmt: skip
_strata = SystemConfig(
  name="strata", description="Strata with bounded waiting and a measured choice of the store path",
  source=_PAPER, version="as published, waiting limits of 8 added",
  not_modelled="tensor parallel ranks as separate caches",
  page_size=1, load_backend="kernel", store_backend="auto", overlap="layer", policy="strata",
)  # fmt: skip
_no_lower_tier = {
  "host": False,
  "write_policy": "none",
  "load_backend": "none",
  "store_backend": "none",
  "overlap": "none",
}

_PRESETS = (
  _paged_attention,
  _sglang_device,
  _lpm(_sglang_device),
  _hicache_paper,
  _lpm(_hicache_paper),
  *(_paged(_hicache_paper, page_size) for page_size in (64, 128, 256, 512, 1024)),
  _hicache_batch,
  _lpm(_hicache_batch),
  *(_paged(_hicache_batch, page_size) for page_size in (64, 128, 256, 512, 1024)),
  _device_put,
  _hicache_today_like,
  _lpm(_hicache_today_like, policy="dedup"),
  _vllm_lmcache_like,
  _trtllm_like,
  _ct_hpkv_like,
  _mooncake_like,
  _strata,
  dataclasses.replace(
    _strata, name="strata_selective", description="Strata, backing up what was accessed twice",
    version="as published (its default write policy)", write_policy="write_through_selective",
    selective_threshold=2,
  ),
  dataclasses.replace(
    _strata, name="strata_auto", page_size=32, load_backend="auto",
    description="Strata on pages of 32: loads, too, by the way measured to be the fastest; contexts"
    " that most of the waiting share come first",
    version="as published; waiting limits of 8, of bypasses 32, and an order added",
    scheduler=SchedulerConfig(order="most_shared", max_bypasses=32),
  ),
  dataclasses.replace(
    _strata, name="strata_io", description="Strata's I/O alone: FCFS", policy=_FCFS
  ),
  dataclasses.replace(
    _lpm(dataclasses.replace(_strata, policy=_FCFS)), name="strata_io_lpm",
    description="Strata's I/O alone: longest prefix match",
  ),
  dataclasses.replace(
    _strata, name="strata_schedule_only",
    description="Strata's scheduling alone, over hicache_paper's page copies",
    page_size=32, load_backend="memcpy_async", store_backend="memcpy_async",
    separate_kv_copies=True,
  ),
  dataclasses.replace(
    _strata, name="strata_paper", description="Strata as published: no limits on waiting",
    version="as published", store_backend="kernel", policy="strata_paper",
  ),
  dataclasses.replace(
    _strata, name="oracle_io", description="Bound: Strata's policy with free loads",
    source="a bound of this project", version="1", not_modelled="",
    load_is_free=True, ideal="free_loads",
    scheduler=SchedulerConfig(ratio_threshold=math.inf),  # nothing is loading-bound
  ),
  dataclasses.replace(
    _strata, name="oracle_cache", description="Bound: every page ever computed is on the device",
    source="a bound of this project", version="1", not_modelled="", ideal="all_on_device",
    **_no_lower_tier,
  ),
  dataclasses.replace(
    _strata, name="recompute", description="Bound: no reuse, every prompt is computed",
    source="a bound of this project", version="1", not_modelled="", prefix_cache=False,
    ideal="no_reuse", **_no_lower_tier,
  ),
)  # fmt: skip

SYSTEMS: dict[str, SystemConfig] = {system.name: system for system in _PRESETS}
"""All presets by name."""


def system(name: str) -> SystemConfig:
  """The preset `name`.

  Raises:
    ValueError: an unknown name.
  """
  if name not in SYSTEMS:
    raise ValueError(f"system: expected one of {', '.join(SYSTEMS)}, got {name!r}")
  return SYSTEMS[name]
