"""Decode batches of real models, for tests and benches."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeArgs:
  """Shapes of one layer's decode attention on one device."""

  batch: int
  heads: int
  kv_heads: int
  head_dim: int
  page_size: int

  def q_shape(self) -> tuple[int, int, int]:
    return self.batch, self.heads, self.head_dim

  def pool_shape(self, pages: int) -> tuple[int, int, int, int, int]:
    return pages, 2, self.page_size, self.kv_heads, self.head_dim


# name: (heads, KV heads, head dim), of the whole model
_MODELS = {
  "llama3.1-8b": (32, 8, 128),
  "llama3.1-70b": (64, 8, 128),
  "qwen2.5-14b": (40, 8, 128),
  "smollm2-135m": (9, 3, 64),
}
_TENSOR_PARALLEL = {"llama3.1-8b": (1, 2, 4), "llama3.1-70b": (1, 2, 4)}
PAGE_SIZES = (16, 32, 64)
_BATCHES = {("llama3.1-8b", 1): (1, 7, 28)}  # one of 7 for the others


def _args() -> dict[str, DecodeArgs]:
  found = {}
  for model, (heads, kv_heads, head_dim) in _MODELS.items():
    for parts in _TENSOR_PARALLEL.get(model, (1,)):
      for page_size in PAGE_SIZES:
        for batch in _BATCHES.get((model, parts), (7,)):
          found[f"{model}-tp{parts}-page{page_size}-batch{batch}"] = DecodeArgs(
            batch=batch,
            heads=heads // parts,
            kv_heads=kv_heads // parts,
            head_dim=head_dim,
            page_size=page_size,
          )
  return found


ARG_SPECS = _args()
