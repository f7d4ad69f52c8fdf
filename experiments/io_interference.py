"""What a stream of fragments costs the compute beside it.

  python -m experiments.io_interference

Runs layers of Llama-3.1-8B's shapes, once as prefill of a prompt and once as decode of a batch,
alone and while KV is loaded from random places: fragments of 4 KiB by the kernel with some numbers
of blocks, in one program on two streams; whole pages of 128 KiB (one token of Llama-3.1-8B) and
2 MiB (16 tokens) by the copy engine. A slowdown of 0.03 means that compute takes 3 % longer for as
long as the load runs.

Per number of blocks a short load is hidden within the compute, which gives the slowdown:
(time of both - time of compute alone) / time of the load alone. A long load outlasts the compute;
its bytes over the time of both are `gbps`. The baseline is the same program with an empty list,
measured in turns with the others. Blocks 0 is that baseline.

Writes `config.json`, `summary.json` and `interference.png` to --out. On a CPU small layers run,
with nothing beside them.
"""

import dataclasses
from typing import Any

import jax

from experiments import flags, io_bench, io_layers, io_streams, plots, run_folder
from strata_jax import validation
from strata_jax.tiers import cuda_copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterferenceConfig:
  """What runs beside what."""

  blocks: tuple[int, ...] = (1, 2, 4, 8, 16)  # thread blocks of the kernel
  copy_page_kib: tuple[int, ...] = (128, 2048)  # whole pages moved by the copy engine
  prefill_tokens: int = 8192  # tokens of the prompt
  prefill_layers: int = 4  # layers of the prefill stack
  decode_batch: int = 32  # sequences that decode
  decode_context: int = 8192  # tokens of context a sequence
  decode_layers: int = 16  # layers of the decode stack
  pool_gib: int = 4  # GiB of the host pool
  rounds: int = 5  # measurements in turns, of which the median counts
  seed: int = 0  # of the lists of slots

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      if field.name not in ("blocks", "copy_page_kib", "seed"):
        validation.check_int(self, field.name, minimum=1)
    for blocks in self.blocks:
      if blocks < 1:
        validation.fail(self, "blocks", "integers >= 1", blocks)
    for kib in self.copy_page_kib:
      if kib < 1:
        validation.fail(self, "copy_page_kib", "integers >= 1", kib)


FLAGS = flags.FlagSet("Measures what fragment I/O costs the compute beside it.")
FLAGS.add(InterferenceConfig)
FLAGS.add_flag("out", str, "runs/io_interference", "folder that the run writes")


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  config = args.config(InterferenceConfig)
  with flags.usage_errors():
    out = run_folder.open_run(args.out, {"flags": args.as_dict(), "seed": config.seed})
  summary = measure_gpu(config) if jax.default_backend() == "gpu" else measure_cpu(config)
  _draw(out, summary)
  run_folder.finish(out, summary)


def measure_cpu(config: InterferenceConfig) -> dict[str, Any]:
  """Small layers alone: shows that the stacks run."""
  run_folder.say("No GPU: small layers run, with nothing beside them.")
  del config
  row = {"backend": "reference", "blocks": 0, "gbps": 0.0}
  for name, stack in io_layers.small_stacks().items():
    seconds = io_streams.seconds_alone(stack)
    row |= {f"{name}_slowdown": 0.0, f"{name}_ms": seconds * 1e3}
  ceiling = io_bench.cpu_copy_gbps()
  return {
    "device_kind": run_folder.device_kind(),
    "ceiling_load_gbps": ceiling,
    "note": "CPU, baseline only: not comparable",
    "rows": [row],
  }


def measure_gpu(config: InterferenceConfig) -> dict[str, Any]:
  """All rows, with the ceiling of the same run."""
  sides = (cuda_copies.SideStream(), cuda_copies.SideStream())
  ceiling = io_bench.dma_ceilings(sides[0])[0]
  run_folder.say(f"one large DMA, load: {ceiling:.1f} GB/s")
  pools = io_bench.make_pools(
    io_bench.fragments_of(4096),
    pool_bytes=config.pool_gib * io_bench.GIB,
    call_bytes=config.pool_gib * io_bench.GIB,
    seed=config.seed,
  )
  beside = io_streams.LoadBeside(pools, config.rounds)
  found: dict[tuple[str, int], dict[str, float]] = {}
  stacks = {
    "prefill": lambda: io_layers.prefill(config.prefill_tokens, config.prefill_layers, "cudnn"),
    "decode": lambda: io_layers.decode(
      config.decode_batch, config.decode_context, config.decode_layers
    ),
  }
  for name, make in stacks.items():
    stack = make()
    for blocks in config.blocks:
      effect = beside.kernel(stack, blocks)
      found["kernel", blocks] = found.get(("kernel", blocks), {}) | _measured(name, effect)
      run_folder.say(f"{name}, kernel, {blocks} blocks: {found['kernel', blocks]}")
    for kib in config.copy_page_kib:
      key = ("copy_engine", kib << 10)
      effect = beside.copy_engine(stack, sides, kib << 10)
      found[key] = found.get(key, {}) | _measured(name, effect)
      run_folder.say(f"{name}, copy engine, pages of {kib} KiB: {found[key]}")
    del stack
  rows = [
    {
      "backend": "kernel",
      "blocks": 0,
      "gbps": 0.0,
      "prefill_slowdown": 0.0,
      "decode_slowdown": 0.0,
    }
  ]
  for (backend, number), values in found.items():
    gbps = min(values["prefill_gbps"], values["decode_gbps"])
    size = {"blocks": number} if backend == "kernel" else {"blocks": 0, "page_bytes": number}
    rows.append({"backend": backend, **size, "gbps": gbps} | values)
  return {
    "device_kind": run_folder.device_kind(),
    "ceiling_load_gbps": ceiling,
    "rows": rows,
  }


def _measured(name: str, effect: io_streams.Effect) -> dict[str, float]:
  return {
    f"{name}_slowdown": effect.slowdown,
    f"{name}_gbps": effect.gbps,
    f"{name}_alone_gbps": effect.alone_gbps,
    f"{name}_ms": effect.compute_s * 1e3,
  }


def _draw(out, summary: dict[str, Any]) -> None:
  """Slowdown against the rate of the load."""
  series = {}
  for name in ("prefill", "decode"):
    for backend in ("kernel", "copy_engine"):
      points = sorted(
        (row.get(f"{name}_gbps", 0.0), 100 * row[f"{name}_slowdown"])
        for row in summary["rows"]
        if row["backend"] == backend
      )
      if points:
        xs, ys = zip(*points, strict=True)
        series[f"{name}, {backend}"] = (xs, ys)
  if series:
    plots.lines(out / "interference.png", series, "GB/s loaded beside it", "slowdown, %")


if __name__ == "__main__":
  FLAGS.run(main)
