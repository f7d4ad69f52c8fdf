"""What a run is set up with."""

import dataclasses
import types

import jax

from experiments import serve_setup
from strata_jax.models import loader


def test_the_fingerprint_names_all_that_kv_bytes_depend_on():
  """Case 33: weights, model, type, layout and page size; of a file's weights the values."""
  model, params, _ = loader.load_model("random", "tiny", seed=0)

  def name(model=model, params=params, *, page_size=16, weights="folder", seed=0, stored=True):
    return serve_setup.fingerprint(
      types.SimpleNamespace(weights=weights, seed=seed), model, params,
      model.page_layout(page_size), object() if stored else None,
    )  # fmt: skip

  assert name() == name(weights="the same folder elsewhere")
  names = [
    name(),
    name(page_size=32),
    name(dataclasses.replace(model, dtype="bfloat16")),
    name(dataclasses.replace(model, rope_theta=2 * model.rope_theta)),
    name(params=jax.tree.map(lambda values: 2 * values, params)),
    *(name(weights="random", seed=seed) for seed in (0, 1)),
    name(weights="folder", stored=False),
    name(weights="another folder", stored=False),
  ]
  assert len(set(names)) == len(names)
