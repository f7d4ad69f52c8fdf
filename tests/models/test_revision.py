"""The short name of weights: equal values, equal names; other values, other names."""

import jax

from strata_jax.models.loader import load_model
from strata_jax.models.revision import weights_revision


def test_the_name_follows_the_values():
  params = load_model("random", "tiny", seed=0)[1]
  same = load_model("random", "tiny", seed=0)[1]
  other = load_model("random", "tiny", seed=1)[1]
  scaled = jax.tree.map(lambda x: x * 1.001, params)
  assert weights_revision(params) == weights_revision(same)
  names = {weights_revision(each) for each in (params, other, scaled)}
  assert len(names) == 3


def test_every_array_counts():
  params = load_model("random", "tiny", seed=0)[1]
  leaves, tree = jax.tree.flatten(params)
  names = {weights_revision(params)}
  for i in range(len(leaves)):
    changed = [leaf + 1 if i == j else leaf for j, leaf in enumerate(leaves)]
    names.add(weights_revision(jax.tree.unflatten(tree, changed)))
  assert len(names) == len(leaves) + 1
