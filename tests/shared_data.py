"""Where the optional test data lies; tests that need it are skipped where it is absent."""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_data(name: str) -> pathlib.Path:
  """The path of a file of the optional test data, or a skip."""
  path = ROOT / name
  if not path.exists():
    pytest.skip(f"optional test data not here: {name}")
  return path
