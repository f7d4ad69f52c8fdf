"""Writes a calibrated profile: the base's files with the fitted numbers in them."""

import json
import pathlib
from typing import Any

from strata_jax import profile as profiles
from strata_jax.calibration import Calibration
from strata_jax.calibration_found import Fitted


def write(
  calibration: Calibration,
  *,
  base: str,
  name: str,
  out: pathlib.Path,
  source: str,
  base_folder: pathlib.Path | str = profiles.FOLDER,
) -> str:
  """Writes `hardware_<name>.json` and `<name>_<model>.json`.

  Fitted numbers are `measured`, with `source` and the number of steps, and so is what the run says;
  what has a source of its own keeps it.
  Of a table one point is, and its source says what the others are. All others stay as they are in
  the base's files.

  Args:
    calibration: of the base profile.
    base: its name, in `base_folder`.
    name: of the machine, for `--hardware`.
    out: the folder to write into.
    source: where the steps come from.
    base_folder: where the base's files are.

  Returns:
    The name of the profile that was written.

  Raises:
    ValueError: a name that is none, or that would overwrite the base.
  """
  model, hardware_file, machine = _base_files(base, base_folder)
  check_name(name, base, base_folder)
  hardware = json.loads(hardware_file.read_text(encoding="utf-8"))
  overrides = model.get("overrides", {})
  hardware |= overrides  # numbers of this model alone
  for key, fitted in calibration.fitted.items():
    _set(hardware, key, fitted, source)
  hardware["description"] = f"{hardware.get('description', machine)}; fitted to steps: {source}"
  model = {**model, "hardware": f"hardware_{name}.json"}
  model.pop("overrides", None)
  written = f"{name}_{base.removeprefix(machine).lstrip('_')}"
  out.mkdir(parents=True, exist_ok=True)
  for file, content in ((model["hardware"], hardware), (f"{written}.json", model)):
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    (out / file).write_text(text, encoding="utf-8")
  return written


def check_name(name: str, base: str, base_folder: pathlib.Path | str = profiles.FOLDER) -> None:
  """Raises ValueError for a name that is none, or the base's."""
  _, _, machine = _base_files(base, base_folder)
  if not name or name != pathlib.Path(name).name or name == machine:
    raise ValueError(f"name: expected the name of a new machine, got {name!r}")


def _base_files(
  base: str, base_folder: pathlib.Path | str
) -> tuple[dict[str, Any], pathlib.Path, str]:
  """The base profile's own file, where that of its hardware is, and the machine's name."""
  folder = pathlib.Path(base_folder)
  model = json.loads((folder / f"{base}.json").read_text(encoding="utf-8"))
  hardware_file = folder / model["hardware"]
  return model, hardware_file, hardware_file.stem.removeprefix("hardware_")


def _set(hardware: dict[str, Any], key: str, fitted: Fitted, source: str) -> None:
  """Puts one fitted number where its key says; `@` and a size may stand behind that of a table."""
  first, *rest = key.partition("@")[0].split(".")
  path = rest if first == "hardware" else [first, *rest]
  parent = hardware
  for part in path[:-1]:
    parent = parent.setdefault(part, {})
  if fitted.source is not None:
    source = fitted.source
  else:
    source = f"fitted to {fitted.steps} steps of {source}" if fitted.steps else f"said by {source}"
  if fitted.size_bytes is None:
    parent[path[-1]] = {"value": fitted.value, "kind": "measured", "source": source}
    return
  table = parent[path[-1]]
  points = {**dict(map(tuple, table["points"])), fitted.size_bytes: fitted.value}
  others = f"its other points, {table['kind']}: {table['source']}"
  parent[path[-1]] = {
    "points": [list(point) for point in sorted(points.items())],
    "kind": "measured",
    "source": f"the point at {fitted.size_bytes:g} bytes {source}; {others}",
  }
