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
_CALLS = {
  "prefill": {"chunk": 512, "starts": (0,), "lengths": (512,)},
  "chunk": {"chunk": 512, "starts": (4000,), "lengths": (389,)},
  "short_chunk": {"chunk": 32, "starts": (2049,), "lengths": (20,)},
  "decode": {"chunk": 1, "starts": (0, 1, 4095, 2000, 0), "lengths": (1, 1, 1, 1, 0)},
}
PAGE_SIZES = (1, 16, 32, 64)

ARG_SPECS = {
  f"{name}-page{page_size}-{call}": ArgSpec(
    heads=config_lib.MODELS[name].num_heads,
    kv_heads=config_lib.MODELS[name].kv_heads,
    head_dim=config_lib.MODELS[name].head_dim,
    page_size=page_size,
    **arguments,
  )
  for name in _MODELS
  for page_size in PAGE_SIZES
  for call, arguments in _CALLS.items()
}
