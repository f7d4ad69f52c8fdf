"""Runs a declared grid of simulations: parallel, resumable, one table and plots at the end.

  python -m experiments.sweep --name=throughput_at_ttft --out=runs/fig8
  python -m experiments.sweep --name=ablation --quick
  python -m experiments.sweep --name=ablation --policy=mine.py:schedule   # rows beside strata's
  python -m experiments.sweep --name=my_sweep.py            # a file with SWEEP in it

A cell that was measured by the same code stays on file under --out and is not run again.
"""

import concurrent.futures
import functools
import gc
import hashlib
import importlib.util
import inspect
import json
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import flags, run_folder
from experiments.sweeps import SWEEPS
from experiments.sweeps.types import Cell, Options, Row, Sweep
from strata_jax import policy_loading, profile

_ROOT = pathlib.Path(__file__).resolve().parents[1]

FLAGS = flags.FlagSet("Runs a sweep of simulations.")
FLAGS.add_flag("name", str, "throughput_at_ttft", f"FILE.py or one of {', '.join(SWEEPS)}")
FLAGS.add(Options)
FLAGS.add_flag("workers", int, 2, "processes")
FLAGS.add_flag("out", str | None, None, "folder that the run writes (default: runs/sweep_NAME)")


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  began_s = time.perf_counter()
  with flags.usage_errors():
    sweep = find(args.name)
    for name in sweep.unused:
      if args.given(name):
        raise ValueError(f"--{name}: expected none with --name={sweep.name}")
    options = args.config(Options)
    if args.workers < 1:
      raise ValueError(f"--workers: expected an integer >= 1, got {args.workers}")
    configs = sweep.cells(options)
    out = run_folder.open_run(
      args.out or f"runs/sweep_{sweep.name}",
      {"flags": args.as_dict(), "seed": None, "cells": configs},
    )
  found = measure_all(args.name, configs, out, args.workers)
  rows = sweep.table(options, found)
  run_folder.write_jsonl(out / "rows.jsonl", rows)
  if sweep.plot is not None:
    sweep.plot(out / f"{sweep.name}.png", rows)
  if sweep.plot_cells is not None:
    sweep.plot_cells(out / f"{sweep.name}.png", found)
  run_folder.say(text_table(rows))
  run_folder.finish(
    out,
    {
      "sweep": sweep.name,
      "cells": len(found),
      "rows": rows,
      "wall_s": time.perf_counter() - began_s,
    },
  )


def find(name: str) -> Sweep:
  """A sweep by name, or `SWEEP` of a Python file. Raises ValueError."""
  if name in SWEEPS:
    return SWEEPS[name]
  path = pathlib.Path(name)
  if not (name.endswith(".py") and path.is_file()):
    raise ValueError(f"--name: expected FILE.py or one of {', '.join(SWEEPS)}, got {name!r}")
  spec = importlib.util.spec_from_file_location(path.stem, path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  sweep = getattr(module, "SWEEP", None)
  if not isinstance(sweep, Sweep):
    raise ValueError(f"--name: expected SWEEP, a Sweep, in {name}")
  return sweep


def measure_all(
  name: str, configs: Sequence[Mapping[str, Any]], out: pathlib.Path, workers: int
) -> list[Cell]:
  """Measures what is not on file yet; cells in the order of `configs`."""
  sweep = find(name)
  folder = out / "cells"
  folder.mkdir(exist_ok=True)
  own = "" if name in SWEEPS else pathlib.Path(name).read_text(encoding="utf-8")
  paths = [folder / f"{cell_key(sweep.name + own, config)}.json" for config in configs]
  missing = [index for index, path in enumerate(paths) if not path.exists()]
  with run_folder.Progress(len(configs), sweep.name) as bar:
    bar.update(len(configs) - len(missing))
    done = len(configs) - len(missing)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
      workers, mp_context=context, initializer=collect_seldom
    ) as pool:
      futures = {pool.submit(measure_one, name, configs[index]): index for index in missing}
      for future in concurrent.futures.as_completed(futures):
        index = futures[future]
        cell = {"config": configs[index], "measured": future.result()}
        partial = paths[index].with_suffix(".part")
        run_folder.write_json(partial, cell)
        partial.replace(paths[index])
        done += 1
        bar.update(done, str(configs[index].get("label", "")))
  return [
    (config, json.loads(path.read_text(encoding="utf-8"))["measured"])
    for config, path in zip(configs, paths, strict=True)
  ]


def measure_one(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
  """One cell, in a process of its own."""
  return find(name).measure(config)


def collect_seldom() -> None:
  """Lets a process look for reference cycles rarely: simulations make many objects, few cycles."""
  gc.freeze()
  gc.set_threshold(100_000, 20, 100)


def cell_key(name: str, config: Mapping[str, Any]) -> str:
  """Names a cell by what it depends on: its config, the sources, its policy's file."""
  policy = config.get("case", {}).get("policy")
  own = policy_source(policy) if policy and ":" in policy else ""
  text = json.dumps([name, run_folder.plain(config), repr(config), source_digest(), own])
  return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


@functools.cache
def policy_source(spec: str) -> str:
  """The text of the file that a policy FILE.py:NAME or module:NAME stands in; "" without one."""
  function = inspect.unwrap(policy_loading.load_function(spec))
  try:
    found = inspect.getsourcefile(function)
  except TypeError:  # an object that can be called
    place = spec.rpartition(":")[0]
    found = place if place.endswith(".py") else sys.modules[place].__file__
  return pathlib.Path(found).expanduser().read_text(encoding="utf-8") if found else ""


@functools.cache
def source_digest() -> str:
  """A digest of the modules that this process has loaded from the source tree, and the profiles."""
  paths = {pathlib.Path(file) for module in list(sys.modules.values())
           if (file := getattr(module, "__file__", None))}  # fmt: skip
  own = {path for path in paths if path.is_relative_to(_ROOT) and ".venv" not in path.parts}
  digest = hashlib.blake2b(digest_size=16)
  for path in sorted(own | set(profile.FOLDER.glob("*.json"))):
    digest.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes())
  return digest.hexdigest()


def text_table(rows: Sequence[Row]) -> str:
  """The rows for people."""
  if not rows:
    return "no rows"
  columns = [key for key in rows[0] if not isinstance(rows[0][key], dict)]
  cells = [columns, *([_text(row.get(column)) for column in columns] for row in rows)]
  widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
  return "\n".join(
    "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    for row in cells
  )


def _text(value: Any) -> str:
  if value is None:
    return "-"
  if isinstance(value, float):
    return f"{value:.4g}"
  if isinstance(value, list):
    return " .. ".join(_text(item) for item in value)
  return str(value)


if __name__ == "__main__":
  FLAGS.run(main)
