"""How fast copies are submitted one by one: the package's loop beside the same loop in C.

  python -m experiments.submit_loop

The published baseline calls `cudaMemcpyAsync` once for K and once for V of every page and layer, so
that what it reaches depends on the loop that calls it. Both loops copy the same parts, between
random places, in turns; a rate counts from the first call to the last byte. Needs an NVIDIA GPU and
a C compiler. Writes `config.json` and `summary.json` (`rows`: `part_bytes`, `direction`,
`package_gbps`, `c_gbps`, `of_c`) to --out.
"""

import ctypes
import dataclasses
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

from experiments import flags, io_baselines, io_bench, run_folder
from strata_jax import validation
from strata_jax.tiers import cuda_copies

_SOURCE = r"""
#include <stddef.h>
typedef int (*copy_call)(void*, const void*, size_t, int, void*);
int copy_each(copy_call call, void** targets, void** sources, size_t count, size_t bytes, int kind,
              void* stream) {
  for (size_t i = 0; i < count; i++) {
    int code = call(targets[i], sources[i], bytes, kind, stream);
    if (code) return code;
  }
  return 0;
}
"""
_KIND_DEFAULT = 4  # cudaMemcpyDefault


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubmitConfig:
  """What is copied."""

  part_bytes: tuple[int, ...] = (4096, 65536)  # of a copy: K or V of a page and layer
  copies: int = 16384  # a round
  rounds: int = 9  # of either loop, of which the median is taken
  seed: int = 0  # of the places

  def __post_init__(self) -> None:
    for field in ("copies", "rounds"):
      validation.check_int(self, field, minimum=1)


FLAGS = flags.FlagSet("Compares the loop that submits single copies with one in C.")
FLAGS.add(SubmitConfig)
FLAGS.add_flag("out", str, "runs/submit_loop", "folder that the run writes")


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  config = args.config(SubmitConfig)
  if jax.default_backend() != "gpu":
    raise flags.UsageError("submit_loop: expected a GPU, got none")
  with flags.usage_errors():
    out = run_folder.open_run(args.out, {"submit": config, "seed": config.seed})
  in_c = c_loop()
  side = cuda_copies.SideStream()
  rows = []
  for part_bytes in config.part_bytes:
    pools = io_bench.make_pools(
      io_bench.fragments_of(part_bytes), pool_bytes=4 * config.copies * part_bytes,
      call_bytes=config.copies * part_bytes, seed=config.seed,
    )  # fmt: skip
    for direction in ("load", "store"):
      copies = io_baselines.driver_copies(pools, direction, config.copies)
      rows.append({"part_bytes": part_bytes, "direction": direction}
                  | _compare(copies, side, in_c, config.rounds))  # fmt: skip
      run_folder.say(str(rows[-1]))
  run_folder.finish(out, {"device_kind": run_folder.device_kind(), "rows": rows})


def c_loop() -> cuda_copies.Submit:
  """`cuda_copies.submit_each` in C. Raises UsageError without a compiler."""
  compiler = shutil.which("cc") or shutil.which("gcc")
  if compiler is None:
    raise flags.UsageError("submit_loop: expected a C compiler (cc or gcc), found none")
  folder = pathlib.Path(tempfile.mkdtemp())
  source, library = folder / "copy_each.c", folder / "copy_each.so"
  source.write_text(_SOURCE)
  subprocess.run([compiler, "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
  function = ctypes.CDLL(str(library)).copy_each
  copy_call = ctypes.cast(cuda_copies.memcpy_async(), ctypes.c_void_p)

  def submit(copies: cuda_copies.Copies, stream: int) -> None:
    pointer = lambda array: array.ctypes.data_as(ctypes.c_void_p)
    code = function(
      copy_call, pointer(copies.targets), pointer(copies.sources),
      ctypes.c_size_t(copies.targets.size), ctypes.c_size_t(copies.size_bytes),
      ctypes.c_int(_KIND_DEFAULT), ctypes.c_void_p(stream),
    )  # fmt: skip
    if code:
      raise RuntimeError(f"cudaMemcpyAsync: CUDA error {code}")

  return submit


def _compare(
  copies: cuda_copies.Copies, side: cuda_copies.SideStream, in_c: cuda_copies.Submit, rounds: int
) -> dict[str, Any]:
  seconds: dict[str, list[float]] = {"package": [], "c": []}
  for round_ in range(rounds + 1):  # the first one warms up
    for name, submit in (("package", cuda_copies.submit_each), ("c", in_c)):
      took_s = _seconds(lambda submit=submit: submit(copies, side.stream), side)
      if round_:
        seconds[name].append(took_s)
  moved = copies.targets.size * copies.size_bytes / 1e9
  package, c = (moved / statistics.median(seconds[name]) for name in ("package", "c"))
  of_c = [b / a for a, b in zip(seconds["package"], seconds["c"], strict=True)]
  return {"package_gbps": package, "c_gbps": c, "of_c": statistics.median(of_c)}


def _seconds(call: Callable[[], None], side: cuda_copies.SideStream) -> float:
  side.synchronize()
  started_s = time.perf_counter()
  call()
  side.synchronize()
  return time.perf_counter() - started_s


if __name__ == "__main__":
  FLAGS.run(main)
