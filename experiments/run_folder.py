"""The folder a run writes, its summary, and progress on standard error.

Standard output belongs to the summary: one JSON object, the last line of every experiment.
"""

import dataclasses
import importlib.metadata
import json
import math
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, TextIO, cast

_PACKAGES = ("strata-jax", "jax", "jaxlib", "flax", "orbax-checkpoint", "numpy")
_SOURCE = pathlib.Path(__file__).resolve().parents[1]


def open_run(out: str | pathlib.Path, config: Mapping[str, Any]) -> pathlib.Path:
  """Makes the folder `out` and writes its `config.json`.

  Args:
    out: the folder; its parents are made, files of an earlier run there are overwritten.
    config: everything that the run depends on, by name: plain values and dataclasses. A `seed`
      among them stands in the file's top level too.

  Returns:
    The folder.

  Raises:
    OSError: `out` cannot be made a folder or written to.
  """
  folder = pathlib.Path(out)
  folder.mkdir(parents=True, exist_ok=True)
  for stale in ("summary.json", "requests.jsonl", "steps.jsonl"):
    (folder / stale).unlink(missing_ok=True)
  facts = command_facts()
  write_json(
    folder / "config.json",
    {"command": facts.pop("command"), "config": config, "seed": config.get("seed"), **facts},
  )
  return folder


def command_facts() -> dict[str, Any]:
  """What ran, of which sources, with which packages, on what."""
  return {
    "command": list(sys.orig_argv[1:]),
    "git_sha": git_sha(),
    "versions": versions(),
    "device_kind": device_kind(),
  }


def finish(out: pathlib.Path, summary: Mapping[str, Any]) -> None:
  """Writes `summary.json` and prints the summary as one line, the last of standard output."""
  write_json(out / "summary.json", summary)
  sys.stderr.flush()
  print(json.dumps(plain(summary), allow_nan=False), flush=True)


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes `value` as JSON that people can read."""
  path.write_text(json.dumps(plain(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_jsonl(path: pathlib.Path, rows: Iterable[Any]) -> None:
  """Writes one JSON value a line: a named tuple as an object, NaN and infinity as null."""
  with path.open("w", encoding="utf-8") as file:
    for row in rows:
      value = cast(Any, row)._asdict() if hasattr(row, "_asdict") else row
      try:
        line = json.dumps(value, allow_nan=False, default=plain)
      except ValueError:  # not finite
        line = json.dumps(plain(value), allow_nan=False)
      file.write(line + "\n")


def plain(value: Any) -> Any:
  """`value` as JSON types: dataclasses and named tuples as objects, NaN and infinity as null."""
  if value is None or isinstance(value, bool | int | str):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
  if isinstance(value, Mapping):
    return {str(key): plain(item) for key, item in value.items()}
  if isinstance(value, tuple) and hasattr(value, "_asdict"):
    return plain(cast(Any, value)._asdict())
  if isinstance(value, list | tuple | set | frozenset):
    items = sorted(value) if isinstance(value, set | frozenset) else value
    return [plain(item) for item in items]
  if hasattr(value, "tolist"):  # numpy arrays and scalars
    return plain(value.tolist())
  return str(value)


def git_sha() -> str | None:
  """The commit of the source tree, with `-dirty` behind it if files differ; None without git."""
  command = ["git", "-C", str(_SOURCE), "describe", "--always", "--abbrev=40"]
  command += ["--exclude=*", "--dirty"]  # no tags
  try:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
  except (OSError, subprocess.TimeoutExpired):
    return None
  return answer.stdout.strip() or None


def versions() -> dict[str, str | None]:
  """Versions of Python and of the packages that results depend on."""
  found: dict[str, str | None] = {"python": platform.python_version()}
  for package in _PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = None
  return found


def device_kind() -> str | None:
  """What JAX computes on; None in a run that has not imported JAX."""
  jax = sys.modules.get("jax")
  return None if jax is None else jax.devices()[0].device_kind


def say(text: str) -> None:
  """One line for people, on standard error."""
  print(text, file=sys.stderr, flush=True)


class Progress:
  """A progress bar on standard error: redrawn on a terminal, else a line now and then.

  Use as a context manager, `update` as often as wanted.
  """

  def __init__(self, total: int, label: str, *, stream: TextIO | None = None) -> None:
    self._total = max(total, 1)
    self._label = label
    self._stream = sys.stderr if stream is None else stream
    self._terminal = self._stream.isatty()
    self._interval_s = 0.1 if self._terminal else 10.0
    self._started_s = self._shown_s = time.monotonic()
    self._shown = False

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def close(self) -> None:
    """Ends the line."""
    if self._terminal and self._shown:
      self._stream.write("\n")
      self._stream.flush()

  def update(self, done: int, note: str = "") -> None:
    """Shows `done` of the total, if enough time went by or all is done."""
    now_s = time.monotonic()
    if done < self._total and now_s - self._shown_s < self._interval_s:
      return
    self._shown_s, self._shown = now_s, True
    share = min(done / self._total, 1.0)
    bar = "#" * round(30 * share)
    elapsed_s = now_s - self._started_s
    line = f"{self._label} [{bar:<30}] {done}/{self._total} {elapsed_s:.0f} s {note}".rstrip()
    self._stream.write(f"\r{line}\x1b[K" if self._terminal else line + "\n")
    self._stream.flush()
