"""Frozen, validated configs and the presets of models. Standard library only."""

import dataclasses

from strata_jax import validation
from strata_jax.tiers.layout import PageLayout

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """The Llama-3.1 frequency scaling (`rope_type: llama3`)."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_context_tokens: int

  def __post_init__(self) -> None:
    for field in ("factor", "low_freq_factor", "high_freq_factor"):
      validation.check_number(self, field, minimum=0.0, exclusive=True)
    validation.check_int(self, "original_context_tokens", minimum=1)
    if self.high_freq_factor <= self.low_freq_factor:
      validation.fail(self, "high_freq_factor", "more than low_freq_factor", self.high_freq_factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """A model of the Llama family."""

  name: str
  num_layers: int
  hidden_size: int
  intermediate_size: int
  num_heads: int  # query heads
  kv_heads: int
  head_dim: int
  vocab_size: int
  context_tokens: int  # longest prompt + output
  rope_theta: float
  rope_scaling: RopeScaling | None = None
  rms_norm_eps: float = 1e-5
  tie_embeddings: bool = False
  qkv_bias: bool = False
  dtype: str = "bfloat16"
  eos_token_ids: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    for field in (
      "num_layers",
      "hidden_size",
      "intermediate_size",
      "num_heads",
      "kv_heads",
      "head_dim",
      "vocab_size",
      "context_tokens",
    ):
      validation.check_int(self, field, minimum=1)
    validation.check_number(self, "rope_theta", minimum=0.0, exclusive=True)
    validation.check_number(self, "rms_norm_eps", minimum=0.0, exclusive=True)
    validation.check_choice(self, "dtype", DTYPES)
    if self.num_heads % self.kv_heads:
      validation.fail(self, "num_heads", f"a multiple of kv_heads={self.kv_heads}", self.num_heads)
    if self.head_dim % 2:
      validation.fail(self, "head_dim", "an even number", self.head_dim)

  def page_layout(self, page_size: int, kv_dtype: str | None = None) -> PageLayout:
    """The layout of this model's KV pages of `page_size` tokens."""
    return PageLayout(
      num_layers=self.num_layers, page_size=page_size, kv_heads=self.kv_heads,
      head_dim=self.head_dim, dtype=kv_dtype or self.dtype,
    )  # fmt: skip


_LLAMA31_ROPE = RopeScaling(
  factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=8192
)

MODELS: dict[str, ModelConfig] = {
  model.name: model
  for model in (
    ModelConfig(
      name="llama31_8b", num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32,
      kv_heads=8, head_dim=128, vocab_size=128256, context_tokens=131072, rope_theta=500000.0,
      rope_scaling=_LLAMA31_ROPE, eos_token_ids=(128001, 128008, 128009),
    ),
    ModelConfig(
      name="llama31_70b", num_layers=80, hidden_size=8192, intermediate_size=28672, num_heads=64,
      kv_heads=8, head_dim=128, vocab_size=128256, context_tokens=131072, rope_theta=500000.0,
      rope_scaling=_LLAMA31_ROPE, eos_token_ids=(128001, 128008, 128009),
    ),
    ModelConfig(
      name="qwen25_14b_1m", num_layers=48, hidden_size=5120, intermediate_size=13824, num_heads=40,
      kv_heads=8, head_dim=128, vocab_size=152064, context_tokens=1010000, rope_theta=10000000.0,
      qkv_bias=True, eos_token_ids=(151645, 151643),
    ),
    ModelConfig(
      name="smollm2_135m", num_layers=30, hidden_size=576, intermediate_size=1536, num_heads=9,
      kv_heads=3, head_dim=64, vocab_size=49152, context_tokens=8192, rope_theta=100000.0,
      tie_embeddings=True, dtype="float32", eos_token_ids=(2,),
    ),
    ModelConfig(
      name="tiny", num_layers=2, hidden_size=32, intermediate_size=64, num_heads=4, kv_heads=2,
      head_dim=8, vocab_size=128, context_tokens=512, rope_theta=10000.0, tie_embeddings=True,
      dtype="float32",
    ),
  )
}  # fmt: skip

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
  """The tiers and how pages move down. Pools are given in tokens, rounded down to whole pages."""

  page_size: int = 16  # tokens of a page
  device_tokens: int = 8192  # room in the device pool
  host_tokens: int = 65536  # room in the host pool; 0: no host tier
  write_policy: str = "write_through"  # or "write_through_selective", "write_back", "none"
  selective_threshold: int = 2  # accesses before write_through_selective backs a node up
  enabled: bool = True  # off: every match is empty
  access_count_entries: int = 1 << 20  # bound of the table of access counts of evicted pages

  def __post_init__(self) -> None:
    validation.check_int(self, "page_size", minimum=1)
    validation.check_int(self, "device_tokens", minimum=self.page_size)
    validation.check_int(self, "host_tokens", minimum=0)
    validation.check_choice(self, "write_policy", WRITE_POLICIES)
    validation.check_int(self, "selective_threshold", minimum=1)
    validation.check_int(self, "access_count_entries", minimum=1)

  @property
  def device_pages(self) -> int:
    return self.device_tokens // self.page_size

  @property
  def host_pages(self) -> int:
    return self.host_tokens // self.page_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageConfig:
  """The storage tier: what is read from it for whom, and what is written to it when.

  What is written follows `CacheConfig.write_policy`. Only runs of pages that lead on from what is
  in memory are read, and only long ones: the rest is computed sooner.
  """

  min_prefetch_tokens: int = 256  # shorter runs are computed, not read from storage
  prefetch_limit_s: float = 30.0  # prefetch policies timeout and cost: wait at most this
  prefetch_base_s: float = 2.0  # and at most this and a share for the length:
  prefetch_s_per_1024_tokens: float = 0.1  # seconds of that share for 1,024 tokens
  read_tokens: int = 1024  # tokens in one read of the store
  prefetch_tokens_in_flight: int = 8192  # tokens of all reads of the store together
  spill_tokens_in_flight: int = 16384  # tokens not handed over to the store yet, at most
  held_host_fraction: float = 0.5  # share of the host pool for pages read for who waits
  writes: bool = True  # off: the store is only read
  retry_s: float = 30.0  # after the store refused a write, none for so long

  def __post_init__(self) -> None:
    validation.check_int(self, "min_prefetch_tokens", minimum=1)
    for field in ("read_tokens", "prefetch_tokens_in_flight", "spill_tokens_in_flight"):
      validation.check_int(self, field, minimum=1)
    for field in (
      "prefetch_limit_s",
      "prefetch_base_s",
      "prefetch_s_per_1024_tokens",
      "retry_s",
    ):
      validation.check_number(self, field, minimum=0.0)
    validation.check_number(self, "held_host_fraction", minimum=0.0, exclusive=True)
    if self.held_host_fraction > 1.0:
      validation.fail(self, "held_host_fraction", "a number <= 1", self.held_host_fraction)

  def prefetch_timeout_s(self, tokens: int) -> float:
    """Seconds that policy timeout gives the prefetch of so many tokens."""
    return min(
      self.prefetch_limit_s,
      self.prefetch_base_s + self.prefetch_s_per_1024_tokens * tokens / 1024,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingConfig:
  """The serving loop: budgets of a step and of the running set."""

  requests_in_flight: int = 128  # waiting + running; later arrivals stay with the client
  running_requests: int = 64  # admitted and not finished, at most
  batch_requests: int = 16  # requests in one prefill batch
  step_tokens: int = 2048  # prefill tokens in one step
  decode_steps: int = 1  # decode steps under one plan at most
  plan_ahead: bool = False  # decide on the next step while one runs, not once it is done

  def __post_init__(self) -> None:
    for field in (
      "requests_in_flight",
      "running_requests",
      "batch_requests",
      "step_tokens",
      "decode_steps",
    ):
      validation.check_int(self, field, minimum=1)
