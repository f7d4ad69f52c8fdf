"""Lists the programs and the systems: `python -m experiments`."""

import ast
import pathlib
import re
import textwrap
from collections.abc import Mapping

from strata_jax import systems

_IS_PROGRAM = re.compile(r"^  FLAGS\.run\(main\)\n\Z", re.MULTILINE)
_COLUMNS = 100


def programs() -> dict[str, str]:
  """What each program of this folder says it is for, by name."""
  found = {}
  for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
    source = path.read_text(encoding="utf-8")
    if _IS_PROGRAM.search(source):
      found[path.stem] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
  return found


def table(texts: Mapping[str, str]) -> str:
  """Names, and beside each its text."""
  width = max(map(len, texts)) + 2
  return "\n".join(
    textwrap.fill(
      text, _COLUMNS, initial_indent=f"  {name:{width}}", subsequent_indent=" " * (width + 2)
    )
    for name, text in texts.items()
  )


def main() -> None:
  """Prints both lists."""
  print("python -m experiments.NAME --help\n")
  print(table(programs()))
  print("\n--system=NAME\n")
  print(table({name: system.description for name, system in systems.SYSTEMS.items()}))


if __name__ == "__main__":
  main()
