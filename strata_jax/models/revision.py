"""A short name for the values of a model's weights, for caches that outlive the process."""

import hashlib

import jax
import numpy as np

from strata_jax.models import llama

_SAMPLES = 4096  # of each array


def weights_revision(params: llama.Params) -> str:
  """A digest of the shapes and of evenly spaced values of every array.

  Weights that were trained differently differ nearly everywhere; it does not find single changed
  values, nor is it meant against an adversary.
  """
  digest = hashlib.blake2b(digest_size=16)
  for path, array in jax.tree_util.tree_leaves_with_path(params):
    step = max(1, array.size // _SAMPLES)
    values = np.asarray(array.reshape(-1)[::step])
    digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
    digest.update(values.tobytes())
  return digest.hexdigest()
