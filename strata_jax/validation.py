"""Checks for configs: every error says what was expected and what came."""

from collections.abc import Collection
from typing import Any


def check_int(owner: object, field: str, *, minimum: int, maximum: int | None = None) -> None:
  """Raises ValueError unless `owner.field` is an int (no bool) in [minimum, maximum]."""
  value = getattr(owner, field)
  wanted = f"an integer >= {minimum}" + ("" if maximum is None else f" and <= {maximum}")
  if isinstance(value, bool) or not isinstance(value, int):
    fail(owner, field, wanted, value)
  if value < minimum or (maximum is not None and value > maximum):
    fail(owner, field, wanted, value)


def check_ints(owner: object, field: str, *, minimum: int) -> None:
  """Raises ValueError unless `owner.field` is a tuple of one or more ints (no bool) >= minimum."""
  value = getattr(owner, field)
  is_int = lambda one: isinstance(one, int) and not isinstance(one, bool)
  if not (isinstance(value, tuple) and value and all(is_int(n) and n >= minimum for n in value)):
    fail(owner, field, f"one or more integers >= {minimum}", value)


def check_number(
  owner: object, field: str, *, minimum: float = float("-inf"), exclusive: bool = False
) -> None:
  """Raises ValueError unless `owner.field` is a number, no NaN, >= (or >) minimum."""
  value = getattr(owner, field)
  wanted = f"a number {'>' if exclusive else '>='} {minimum}"
  if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
    fail(owner, field, wanted, value)
  if value < minimum or (exclusive and value == minimum):
    fail(owner, field, wanted, value)


def check_choice(owner: object, field: str, choices: Collection[Any]) -> None:
  """Raises ValueError unless `owner.field` is one of `choices`."""
  value = getattr(owner, field)
  if value not in choices:
    fail(owner, field, "one of " + ", ".join(str(c) for c in choices), value)


def fail(owner: object, field: str, expected: str, got: object) -> None:
  """Raises the ValueError all configs use."""
  raise ValueError(f"{type(owner).__name__}.{field}: expected {expected}, got {got!r}")
