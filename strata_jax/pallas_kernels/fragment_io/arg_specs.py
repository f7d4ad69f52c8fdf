"""Real models' pages, for tests and benches."""

from strata_jax.tiers import layout

# name: (layers, KV heads, head dim, dtype), of the whole model
_MODELS = {
  "llama3.1-8b": (32, 8, 128, "bfloat16"),
  "llama3.1-70b": (80, 8, 128, "bfloat16"),
  "qwen2.5-14b": (48, 8, 128, "bfloat16"),
  "smollm2-135m": (30, 3, 64, "bfloat16"),
}
_TENSOR_PARALLEL = {"llama3.1-8b": (1, 2, 4), "llama3.1-70b": (1, 2, 4)}
PAGE_SIZES = (1, 16, 32, 64)


def _layouts() -> dict[str, layout.PageLayout]:
  found = {}
  for model, (layers, kv_heads, head_dim, dtype) in _MODELS.items():
    for parts in _TENSOR_PARALLEL.get(model, (1,)):
      for page_size in PAGE_SIZES:
        found[f"{model}-tp{parts}-page{page_size}"] = layout.PageLayout(
          num_layers=layers,
          page_size=page_size,
          kv_heads=kv_heads // parts,
          head_dim=head_dim,
          dtype=dtype,
        )
  return found


ARG_SPECS = _layouts()
