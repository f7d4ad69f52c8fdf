"""What each kind of code may use: policy, metadata, and the package as a whole."""

import ast
import pathlib
import subprocess
import sys

import pytest

import strata_jax

PACKAGE = pathlib.Path(strata_jax.__file__).parent
PURE = {
  "bisect", "collections", "dataclasses", "enum", "functools", "heapq", "itertools", "math",
  "operator", "typing",
}  # fmt: skip
POLICY = sorted(PACKAGE.glob("scheduler/*.py"))
METADATA = [
  *sorted(PACKAGE.glob("controller/*.py")),
  *(
    PACKAGE / f"{name}.py"
    for name in (
      "access_history", "cache_controller", "page_allocator", "page_keys", "radix_node",
      "radix_tree", "storage_tier", "token_arrays",
    )
  ),
]  # fmt: skip


def modules_of(path: pathlib.Path) -> set[str]:
  """Full names of all that a file imports, at its top or anywhere else."""
  found: set[str] = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      found |= {f"{node.module}.{alias.name}" for alias in node.names}
  return found


@pytest.mark.parametrize("path", POLICY, ids=lambda path: path.stem)
def test_policies_use_the_standard_library_and_no_clock_chance_or_io(path):
  for name in modules_of(path):
    own = name.startswith("strata_jax.scheduler.") or name == "strata_jax.validation"
    assert own or name.split(".")[0] in PURE, name
  names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
  assert not names & {"open", "print", "input", "__import__"}


@pytest.mark.parametrize("path", METADATA, ids=lambda path: path.stem)
def test_metadata_knows_no_clock_chance_or_io(path):
  allowed = PURE | {"numpy", "hashlib", "sys", "strata_jax"}
  assert {name.split(".")[0] for name in modules_of(path)} <= allowed


def test_neither_metadata_nor_a_simulation_needs_jax():
  code = "import sys, strata_jax.simulation, strata_jax.serving_loop; print('jax' in sys.modules)"
  answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert answer.stdout == "False\n"


def test_the_package_reads_no_flags_and_knows_no_experiment():
  for path in PACKAGE.rglob("*.py"):
    used = {name.split(".")[0] for name in modules_of(path)}
    assert not used & {"absl", "argparse", "experiments"}, path
