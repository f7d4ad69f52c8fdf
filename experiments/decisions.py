"""How two plans differ, in words for people and as JSON."""

import dataclasses
from typing import Any

from strata_jax.scheduler.views import SchedulerView, StepPlan

FIELDS = tuple(f.name for f in dataclasses.fields(StepPlan) if f.name != "version")


def differences(first: StepPlan, second: StepPlan) -> dict[str, dict[str, Any]]:
  """The fields that differ, each with what only one of the two has.

  Returns:
    For fields that are tuples the members that the other plan lacks (both orders in full when only
    the order differs), else the values.
  """
  found: dict[str, dict[str, Any]] = {}
  for field in FIELDS:
    a, b = getattr(first, field), getattr(second, field)
    if a == b:
      continue
    if isinstance(a, tuple) and isinstance(b, tuple):
      only_a = [item for item in a if item not in b]
      only_b = [item for item in b if item not in a]
      if not only_a and not only_b:
        only_a, only_b = list(a), list(b)
      found[field] = {"first": only_a, "second": only_b}
    else:
      found[field] = {"first": a, "second": b}
  return found


def same_state(first: SchedulerView, second: SchedulerView) -> bool:
  """Whether two views differ in time and version at most."""
  return _timeless(first) == _timeless(second)


def _timeless(view: SchedulerView) -> SchedulerView:
  return dataclasses.replace(view, version=0, now_s=0.0)


def describe(view: SchedulerView) -> dict[str, Any]:
  """A view in a few numbers."""
  return {
    "version": view.version,
    "now_s": view.now_s,
    "waiting": len(view.waiting),
    "running": len(view.running),
    "parked": len(view.parked.request_ids) if view.parked else 0,
    "free_pages": view.free_pages,
    "evictable_pages": view.evictable_pages,
  }


def text(found: dict[str, dict[str, Any]]) -> list[str]:
  """One line a field."""
  return [f"  {field}: {sides['first']} -> {sides['second']}" for field, sides in found.items()]
