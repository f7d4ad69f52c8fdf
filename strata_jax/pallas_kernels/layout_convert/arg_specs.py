"""Real models' pages, for tests and benches: those of `fragment_io` of which tests need a few."""

from strata_jax.pallas_kernels.fragment_io import arg_specs

ARG_SPECS = {
  name: arg_specs.ARG_SPECS[name]
  for name in (
    "llama3.1-8b-tp1-page1",
    "llama3.1-8b-tp1-page16",
    "llama3.1-8b-tp4-page1",
    "llama3.1-70b-tp4-page16",
    "qwen2.5-14b-tp1-page32",
    "smollm2-135m-tp1-page1",
    "smollm2-135m-tp1-page16",
  )
}
