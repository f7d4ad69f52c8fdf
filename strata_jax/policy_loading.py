"""Policies from a file or a module: `FILE.py:NAME` or `package.module:NAME`.

NAME is a function `(view: SchedulerView, config: SchedulerConfig) -> StepPlan`. Names without a
colon are those of `strata_jax.scheduler.policies.POLICIES`.
"""

import importlib
import importlib.util
import inspect
import pathlib
import sys
import types
from collections.abc import Callable

from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import POLICIES, Policy, make_policy
from strata_jax.scheduler.views import SchedulerView, StepPlan

PolicyFunction = Callable[[SchedulerView, SchedulerConfig], StepPlan]


def load_policy(spec: str, config: SchedulerConfig | None = None) -> Policy:
  """The policy that `spec` names, with `config` (default: SchedulerConfig()) bound.

  Raises:
    ValueError: an unknown name, no such file or module, a file that fails to import (with the
      error), no such name in it, or something that does not take a view and a config. The policy
      itself: when the function answers with anything but a plan.
  """
  if spec in POLICIES:
    return make_policy(spec, config)
  if ":" not in spec:
    raise ValueError(
      f"policy: expected one of {', '.join(POLICIES)}, FILE.py:NAME or module:NAME, got {spec!r}"
    )
  function, bound = load_function(spec), config or SchedulerConfig()

  def policy(view: SchedulerView) -> StepPlan:
    plan = function(view, bound)
    if not isinstance(plan, StepPlan):
      raise ValueError(f"policy {spec!r}: expected a StepPlan, got {type(plan).__name__}")
    return plan

  return policy


def load_function(spec: str) -> PolicyFunction:
  """The function that `FILE.py:NAME` or `module:NAME` names. Raises ValueError as load_policy."""
  place, _, name = spec.rpartition(":")
  if not place or not name.isidentifier():
    raise ValueError(f"policy: expected FILE.py:NAME or module:NAME, got {spec!r}")
  module = _from_file(place) if place.endswith(".py") else _from_module(place)
  if not hasattr(module, name):
    raise ValueError(f"policy {spec!r}: expected the name {name!r} in {place}")
  function = getattr(module, name)
  if not callable(function):
    raise ValueError(f"policy {spec!r}: expected a function, got {type(function).__name__}")
  try:
    signature = inspect.signature(function)
    signature.bind(object(), object())
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"policy {spec!r}: expected a function of (view, config), got {name}: {error}"
    ) from error
  return function


def _from_file(place: str) -> types.ModuleType:
  path = pathlib.Path(place).expanduser().resolve()
  if not path.is_file():
    raise ValueError(f"policy: expected a file, got {place!r}")
  name = f"strata_jax_policy_{path.stem}"
  found = importlib.util.spec_from_file_location(name, path)
  if found is None or found.loader is None:
    raise ValueError(f"policy: expected a Python file, got {place!r}")
  module = importlib.util.module_from_spec(found)
  sys.modules[name] = module  # dataclasses look their module up
  try:
    found.loader.exec_module(module)
  except Exception as error:
    del sys.modules[name]
    raise ValueError(f"policy {place!r}: failed to import: {_described(error)}") from error
  return module


def _from_module(place: str) -> types.ModuleType:
  try:
    return importlib.import_module(place)
  except Exception as error:
    raise ValueError(f"policy {place!r}: failed to import: {_described(error)}") from error


def _described(error: Exception) -> str:
  return f"{type(error).__name__}: {error}"
