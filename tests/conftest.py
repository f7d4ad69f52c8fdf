"""Where all tests compile to, and which ones are left out."""

import atexit
import os
import shutil
import tempfile

import jax
import pytest

# Many tests compile the same programs, in processes of their own: they share what is compiled.
_CACHE = "JAX_COMPILATION_CACHE_DIR"
if _CACHE not in os.environ:
  os.environ[_CACHE] = tempfile.mkdtemp(prefix="strata_jax_tests_")
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"  # both for the processes to come
  jax.config.update("jax_compilation_cache_dir", os.environ[_CACHE])
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
  atexit.register(shutil.rmtree, os.environ[_CACHE], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Tests marked `gpu` are skipped where JAX has no GPU."""
  if jax.default_backend() == "gpu":
    return
  skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
  for item in items:
    if item.get_closest_marker("gpu"):
      item.add_marker(skip)
