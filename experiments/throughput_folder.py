"""The folder of the throughput experiment: points are added run by run, none is measured twice."""

import gzip
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from experiments import flags, run_files, run_folder

_OF_A_COMMAND = ("reference",)  # keys of older folders that are no part of the config


class PointsFolder:
  """`config.json`, `points.jsonl`, `requests.jsonl.gz`, `steps.jsonl.gz`, `summary.json`."""

  def __init__(
    self,
    path: str | pathlib.Path,
    config: Mapping[str, Any],
    policies: Mapping[str, str | None] | None = None,
  ) -> None:
    """Opens the folder, or makes it.

    Args:
      path: the folder.
      config: all that points of one folder have in common, as plain values.
      policies: digests of the texts of policies, by label of who has them.

    Raises:
      UsageError: the folder has points of another config, or of a label with another policy.
      OSError: it cannot be made or written to.
    """
    self.path = pathlib.Path(path)
    self.path.mkdir(parents=True, exist_ok=True)
    self.rows: list[dict[str, Any]] = []
    self._commands: list[dict[str, Any]] = []
    known = run_folder.plain(config)
    self._check(known)
    points = self.path / "points.jsonl"
    if points.exists():
      self.rows = read_points(points)
    self._check_policies(policies or {})
    self._commands.append(run_folder.command_facts())
    run_folder.write_json(self.path / "config.json", {"config": known, "commands": self._commands})

  @property
  def command(self) -> int:
    """How many runs wrote here before."""
    return len(self._commands) - 1

  def add(
    self,
    row: Mapping[str, Any],
    requests: Iterable[Mapping[str, Any]],
    steps: Iterable[Mapping[str, Any]],
  ) -> None:
    """Writes a point; its own line comes last, so that what stands there is whole."""
    order = len(self.rows)
    for name, items in (("requests", requests), ("steps", steps)):
      with gzip.open(self.path / f"{name}.jsonl.gz", "at", encoding="utf-8") as file:
        for item in items:
          file.write(_line({"point": order, **item}))
    plain = run_folder.plain({"order": order, "command": self.command, **row})
    with (self.path / "points.jsonl").open("a", encoding="utf-8") as file:
      file.write(_line(plain))
    self.rows.append(plain)

  def _check(self, config: Mapping[str, Any]) -> None:
    path = self.path / "config.json"
    if not path.exists():
      return
    before = json.loads(path.read_text(encoding="utf-8"))
    was = {key: value for key, value in before["config"].items() if key not in _OF_A_COMMAND}
    changed = [
      f"{key}={was.get(key)!r} there and {config.get(key)!r} now"
      for key in sorted({*was, *config})
      if was.get(key) != config.get(key)
    ]
    if changed:
      raise flags.UsageError(f"--out={self.path}: expected the config there, got {changed[0]}")
    self._commands = before["commands"]

  def _check_policies(self, policies: Mapping[str, str | None]) -> None:
    for row in self.rows:
      label, digest = row.get("system"), row.get("policy_digest")
      if label in policies and digest != policies[label]:
        raise flags.UsageError(
          f"--policy: expected the text that served {label} in {self.path}, got another one; "
          "rename it, or give another --out"
        )


def read_points(path: pathlib.Path) -> list[dict[str, Any]]:
  """The rows of a `points.jsonl`. Raises OSError; ValueError with the line that is no object."""
  return list(run_files.read_rows(path))


def reference_ttft_s(rows: Iterable[Mapping[str, Any]]) -> float | None:
  """T_ref of a folder: of the commands whose rows say so, that with the most isolated requests.

  Their mean depends on which contexts they are about: that of many is the workload's.
  """
  found = [
    (row.get("reference_requests") or 0, row["reference_ttft_s"])
    for row in rows
    if row.get("reference_ttft_s") is not None
  ]
  most = max((requests for requests, _ in found), default=0)
  times = {ttft_s for requests, ttft_s in found if requests == most}
  return sum(times) / len(times) if times else None


def _line(value: Any) -> str:
  return json.dumps(run_folder.plain(value), allow_nan=False) + "\n"
