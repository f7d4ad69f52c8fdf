"""What README shows of Python runs as it stands."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run(program, folder):
  return subprocess.run(
    [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"],
    cwd=folder, capture_output=True, text=True, check=True,
  ).stdout  # fmt: skip


def test_the_tree_alone_runs(tmp_path):
  _, tree, _ = BLOCKS
  assert run(tree, tmp_path).split() == re.findall(r"print.*# (\d+)", tree)
  assert run(f"{tree}\nprint('jax' in sys.modules)", tmp_path).split()[-1] == "False"


def test_the_policy_and_the_library_example_run(tmp_path):
  policy, _, library = BLOCKS
  (tmp_path / "mine.py").write_text(policy)
  check = 'from strata_jax import testing; testing.check_policy("mine.py:shortest_job_first")'
  assert run(check, tmp_path) == ""
  printed = run(f"{library}\nprint('jax' in sys.modules)", tmp_path).split()
  assert f"{float(printed[0]):.2f}" in library
  assert printed[1] == "False"
