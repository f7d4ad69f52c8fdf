"""Where all tests compile to, and which ones are left out."""

import atexit
import os
import shutil
import tempfile

# Many tests compile the same programs, in processes of their own: they share what is compiled.
_CACHE = "JAX_COMPILATION_CACHE_DIR"
if _CACHE not in os.environ:
  os.environ[_CACHE] = tempfile.mkdtemp(prefix="strata_jax_tests_")
  atexit.register(shutil.rmtree, os.environ[_CACHE], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import jax  # noqa: E402
import pytest  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Tests marked `gpu` are skipped where JAX has no GPU."""
  if jax.default_backend() == "gpu":
    return
  skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
  for item in items:
    if item.get_closest_marker("gpu"):
      item.add_marker(skip)
