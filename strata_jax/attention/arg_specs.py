"""Real models' attention, for tests and measurements."""

import dataclasses

from strata_jax import config as config_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec:
  """One call: a batch of chunks behind contexts, as `api.paged_attention` takes it."""

  heads: int
  kv_heads: int
  head_dim: int
  page_size: int
  chunk: int  # padded tokens; 1: decode
  starts: tuple[int, ...]  # tokens before the chunk, a row each
  lengths: tuple[int, ...]  # valid tokens of the chunk, a row each; 0: a padded row


_MODELS = ("llama31_8b", "llama31_70b", "qwen25_14b_1m")
# name: chunk, starts, lengths
_CALLS: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
  "prefill": (512, (0,), (512,)),
  "chunk": (512, (4000,), (389,)),
  "short_chunk": (32, (2049,), (20,)),
  "decode": (1, (0, 1, 4095, 2000, 0), (1, 1, 1, 1, 0)),
}
PAGE_SIZES = (1, 16, 32, 64)

ARG_SPECS = {
  f"{name}-page{page_size}-{call}": ArgSpec(
    heads=config_lib.MODELS[name].num_heads,
    kv_heads=config_lib.MODELS[name].kv_heads,
    head_dim=config_lib.MODELS[name].head_dim,
    page_size=page_size,
    chunk=chunk,
    starts=starts,
    lengths=lengths,
  )
  for name in _MODELS
  for page_size in PAGE_SIZES
  for call, (chunk, starts, lengths) in _CALLS.items()
}
