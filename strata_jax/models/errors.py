"""What goes wrong while a model is read, as one line that says what to do."""

import importlib
from types import ModuleType


class WeightsError(ValueError):
  """Weights, their config or their tokenizer cannot be used; the message is one line."""


def optional_package(name: str, purpose: str) -> ModuleType:
  """Imports a package of the `weights` extra.

  Raises:
    WeightsError: it is not installed.
  """
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise WeightsError(
      f"{purpose} needs the package '{name}': pip install 'strata-jax[weights]'"
    ) from error
