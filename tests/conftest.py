import jax
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Tests marked `gpu` are skipped where JAX has no GPU."""
  if jax.default_backend() == "gpu":
    return
  skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
  for item in items:
    if item.get_closest_marker("gpu"):
      item.add_marker(skip)
