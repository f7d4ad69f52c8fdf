"""How fast fragments of KV move between pinned host memory and the device, by every back end.

  python -m experiments.io_bandwidth
  python -m experiments.io_bandwidth --renew_auto_table

Sweeps back end, direction, fragment size, blocks, size of the host pool and pages a call, over
random lists of slots; the rate of one large DMA is measured in the same run. Writes `config.json`,
`summary.json`, `by_fragment.png` and `by_blocks.png` (Figs 3 and 5 of the Strata paper) to --out.
On a CPU only the reference back end runs, small: its numbers say nothing about a GPU.

Back ends of the rows, beside those of the library:
  kernel_as_given       the kernel, lists not put in the order of host memory
  cuda_register_copy    a kernel written by hand in CUDA C++, lists as given
  driver_batch          one cudaMemcpyBatchAsync of all fragments
  driver_each           one cudaMemcpyAsync a fragment
`call` is what moved: "layer" one layer of every page (here pages of one layer, unless `page_bytes`
says more), "pages" all layers.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from experiments import flags, io_bandwidth_plots, io_baselines, io_bench, run_folder
from strata_jax import validation
from strata_jax.pallas_kernels import timing
from strata_jax.pallas_kernels.fragment_io import api, arg_specs
from strata_jax.pallas_kernels.fragment_io import bench as fragment_bench
from strata_jax.pallas_kernels.layout_convert import bench as layout_bench
from strata_jax.tiers import (
  cuda_copies,
  io_auto,
  io_backend,
  io_choice,
  io_kernel,
  layout,
)

_DIRECTIONS = ("load", "store")
_BLOCKS = 2  # where they are not swept
_DRIVER_COPIES = 16384  # a call of single driver copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class BandwidthConfig:
  """What is swept."""

  fragment_bytes: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 65536, 262144)  # fragment sizes
  blocks: tuple[int, ...] = (1, 2, 3, 4, 8)  # thread blocks, for the fragments of --by_blocks
  by_blocks: tuple[int, ...] = (2048, 4096, 16384)  # fragment sizes at which blocks are swept
  pool_gib: tuple[int, ...] = (2, 8, 16)  # GiB of host pools, swept with fragments of 4 KiB
  pages_a_call: tuple[int, ...] = (1, 8, 64, 512, 2048)  # pages of 32 fragments of 4 KiB
  call_mib: int = 512  # MiB moved by one call
  seed: int = 0  # of the lists of slots

  def __post_init__(self) -> None:
    validation.check_int(self, "call_mib", minimum=1)
    for size in (*self.fragment_bytes, *self.by_blocks):
      if size < 256 or size % 256:
        validation.fail(self, "fragment_bytes", "multiples of 256", size)


FLAGS = flags.FlagSet("Measures the bandwidth of fragment I/O.")
FLAGS.add(BandwidthConfig)
FLAGS.add_flag("renew_auto_table", bool, False, "write the table that the back end `auto` reads")
FLAGS.add_flag("models", bool, True, "also whole pages of real models, and layout conversion")
FLAGS.add_flag("out", str, "runs/io_bandwidth", "folder that the run writes")

Row = dict[str, Any]


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  config = args.config(BandwidthConfig)
  on_gpu = jax.default_backend() == "gpu"
  if args.renew_auto_table and not on_gpu:
    raise flags.UsageError("--renew_auto_table: expected a GPU to measure")
  with flags.usage_errors():
    out = run_folder.open_run(args.out, {"flags": args.as_dict(), "seed": config.seed})
  if on_gpu:
    summary = measure_gpu(config, models=args.models, auto=args.renew_auto_table)
  else:
    summary = measure_cpu(config)
  io_bandwidth_plots.draw(out, summary)
  if args.renew_auto_table:
    run_folder.write_json(io_choice.TABLE_PATH, auto_table(summary))
    run_folder.say(f"wrote {io_choice.TABLE_PATH}")
  run_folder.finish(out, summary)


def measure_cpu(config: BandwidthConfig) -> dict[str, Any]:
  """The reference back end on small pools."""
  run_folder.say("No GPU: only the reference back end runs, small. Its rates are those of a CPU.")
  rows = []
  for size in config.fragment_bytes:
    pools = io_bench.make_pools(
      io_bench.fragments_of(size), pool_bytes=8 << 20, call_bytes=4 << 20, seed=config.seed
    )
    backend = io_auto.make_io_backend("reference", pools.page_layout)
    rows += backend_rows(pools, backend, blocks=0)
  ceiling = io_bench.cpu_copy_gbps()
  return _summary(rows, ceiling, ceiling, note="CPU, reference back end only: not comparable")


def measure_gpu(config: BandwidthConfig, *, models: bool, auto: bool) -> dict[str, Any]:
  """Every back end, with the ceilings before and after; on request the sizes of `auto`, too."""
  side = cuda_copies.SideStream()
  rows: list[Row] = []
  before = io_bench.dma_ceilings(side)
  run_folder.say(f"one large DMA: load {before[0]:.1f} GB/s, store {before[1]:.1f} GB/s")
  anchor = io_baselines.CudaRegisterCopy(side)
  for part in (
    lambda: _by_fragment(config, side, anchor),
    lambda: _by_pool(config),
    lambda: _whole_pages(config),
    lambda: _device_put(config),
    lambda: _auto_sizes(config) if auto else (),
  ):
    for row in part():
      run_folder.say(_line(row))
      rows.append(row)
  more = {"arg_specs": _arg_specs(config), "layout_convert": _layout_convert()} if models else {}
  after = io_bench.dma_ceilings(side)
  summary = _summary(rows, *(max(pair) for pair in zip(before, after, strict=True)))
  return summary | {"ceilings_before_gbps": before, "ceilings_after_gbps": after} | more


def backend_rows(
  pools: io_bench.Pools,
  backend: io_backend.IoBackend,
  *,
  blocks: int,
  name: str | None = None,
  call: str = "pages",
) -> list[Row]:
  """Load and store of the lists by one back end; `call` "layer" loads layer 0 alone."""
  count = jnp.int32(pools.pages)
  state = {"host": pools.host, "device": pools.device}
  here, there = pools.host_slots, pools.device_slots

  def load():
    state["device"] = backend.load(state["host"], state["device"], here, there, count)
    return state["device"]

  def load_layer():
    first = backend.load_layer(state["host"], state["device"][0], 0, here, there, count)
    state["device"] = (first, *state["device"][1:])
    return first

  def store():
    state["host"] = backend.store(state["device"], state["host"], there, here, count)
    return state["host"]

  page_layout = pools.page_layout
  if call == "layer":
    moved_bytes = pools.pages * page_layout.fragment_bytes
    seconds = {"load": timing.seconds_a_call(load_layer)}
    right = True
  else:
    moved_bytes = pools.call_bytes
    seconds = {"load": timing.seconds_a_call(load)}
    right = io_bench.arrived(pools, state["device"])
    seconds["store"] = timing.seconds_a_call(store)
    # What came back must still be what a load brings.
    right = right and io_bench.arrived(pools, load())
  if not right:
    raise RuntimeError(f"{backend.name}: wrong bytes, {page_layout}")
  return [
    {
      "backend": name or backend.name,
      "direction": direction,
      "fragment_bytes": page_layout.fragment_bytes,
      "page_bytes": page_layout.page_bytes,
      "blocks": blocks,
      "pool_bytes": pools.host.nbytes,
      "pages": pools.pages,
      "call": call,
      "call_bytes": moved_bytes,
      "gbps": moved_bytes / value / io_bench.GB,
    }
    for direction, value in seconds.items()
  ]


def _kernel(page_layout: layout.PageLayout, blocks: int, sort_from: int = 0) -> Any:
  config = api.FragmentIoConfig(load_blocks=blocks, store_blocks=blocks, sort_from=sort_from)
  return io_kernel.KernelIo(page_layout, config)


_NEVER = 2**31 - 1


def _by_fragment(
  config: BandwidthConfig,
  side: cuda_copies.SideStream,
  anchor: io_baselines.CudaRegisterCopy,
) -> Iterator[Row]:
  """Fragment sizes; blocks at some of them; the driver and the kernel in CUDA C++ beside them."""
  for size in sorted({*config.fragment_bytes, *config.by_blocks}):
    make = lambda size=size: io_bench.make_pools(
      io_bench.fragments_of(size),
      pool_bytes=2 * io_bench.GIB,
      call_bytes=config.call_mib << 20,
      seed=config.seed,
    )
    pools = make()
    common = {
      "fragment_bytes": size,
      "page_bytes": size,
      "pool_bytes": pools.host.nbytes,
      "call": "layer",
    }
    for direction in _DIRECTIONS:
      for name, submit in (
        ("driver_batch", cuda_copies.submit_batch),
        ("driver_each", cuda_copies.submit_each),
      ):
        rate = io_baselines.driver_rate(pools, direction, submit, side, _DRIVER_COPIES)
        yield common | {"backend": name, "direction": direction, "blocks": 0, "gbps": rate}
      for blocks in config.blocks if size in config.by_blocks else (_BLOCKS,):
        launch = functools.partial(anchor.submit, pools, direction, blocks)
        rate = pools.call_bytes / io_bench.seconds_on_stream(launch, side) / io_bench.GB
        yield common | {
          "backend": "cuda_register_copy",
          "direction": direction,
          "blocks": blocks,
          "gbps": rate,
        }
    del pools
    for blocks in config.blocks if size in config.by_blocks else (_BLOCKS,):
      backend = _kernel(io_bench.fragments_of(size), blocks)
      yield from backend_rows(make(), backend, blocks=blocks)
    backend = _kernel(io_bench.fragments_of(size), _BLOCKS, _NEVER)
    yield from backend_rows(make(), backend, blocks=_BLOCKS, name="kernel_as_given")


def _by_pool(config: BandwidthConfig) -> Iterator[Row]:
  for gib in config.pool_gib:
    for name, sort_from in (("kernel", 0), ("kernel_as_given", _NEVER)):
      pools = io_bench.make_pools(
        io_bench.fragments_of(4096),
        pool_bytes=gib * io_bench.GIB,
        call_bytes=config.call_mib << 20,
        seed=config.seed,
      )
      backend = _kernel(pools.page_layout, 2, sort_from)
      yield from backend_rows(pools, backend, blocks=2, name=name)


def _whole_pages(config: BandwidthConfig) -> Iterator[Row]:
  """Pages of 32 layers, 128 KiB: all layers, one layer, and few pages a call."""
  page_layout = io_bench.fragments_of(4096, num_layers=32)
  for pages in config.pages_a_call:
    make = lambda pages=pages: io_bench.make_pools(
      page_layout,
      pool_bytes=2 * io_bench.GIB,
      call_bytes=pages * page_layout.page_bytes,
      seed=config.seed,
    )
    yield from backend_rows(make(), _kernel(page_layout, 2), blocks=2)
    yield from backend_rows(make(), _kernel(page_layout, 2), blocks=2, call="layer")
    engine = io_auto.make_io_backend("copy_engine", page_layout)
    yield from backend_rows(make(), engine, blocks=0)
  few = io_bench.make_pools(
    page_layout, pool_bytes=io_bench.GIB, call_bytes=64 * page_layout.page_bytes, seed=config.seed
  )
  yield from backend_rows(few, io_auto.make_io_backend("memcpy_async", page_layout), blocks=0)


def _device_put(config: BandwidthConfig) -> Iterator[Row]:
  """Separate pages of 512 KiB, and the kernel beside it."""
  page_layout = io_bench.fragments_of(16384, num_layers=32)
  for name in ("device_put", "kernel"):
    pools = io_bench.make_pools(
      page_layout, pool_bytes=io_bench.GIB, call_bytes=256 << 19, seed=config.seed
    )
    backend = io_auto.make_io_backend(name, page_layout)
    yield from backend_rows(pools, backend, blocks=2 if name == "kernel" else 0)


def _auto_sizes(config: BandwidthConfig) -> Iterator[Row]:
  """Page sizes and call sizes between which the table of `auto` chooses."""
  for fragment_bytes in (512, 32768):
    page_layout = io_bench.fragments_of(fragment_bytes, num_layers=32)
    for call_bytes in (1 << 20, 16 << 20, 256 << 20):
      for name in io_choice.CANDIDATES:
        pools = io_bench.make_pools(
          page_layout, pool_bytes=io_bench.GIB, call_bytes=call_bytes, seed=config.seed
        )
        backend = io_auto.make_io_backend(name, page_layout)
        yield from backend_rows(pools, backend, blocks=2 if name == "kernel" else 0)


def _arg_specs(config: BandwidthConfig) -> list[Row]:
  """Whole pages of real models, 1 and 16 tokens a page."""
  rows = []
  for name, page_layout in arg_specs.ARG_SPECS.items():
    if page_layout.page_size not in (1, 16):
      continue
    pages = max(1, (config.call_mib << 20) // page_layout.page_bytes)
    rates = fragment_bench.measure(page_layout, host_pages=2 * pages, pages=pages)
    rows.append({"name": name, "fragment_bytes": page_layout.fragment_bytes, **rates})
    run_folder.say(f"{name}: load {rates['load']:.1f}, store {rates['store']:.1f} GB/s")
  return rows


def _layout_convert() -> dict[str, Any]:
  """Pages of Llama-3.1-8B, 1 GiB a call."""
  copy_gbps = layout_bench.device_copy_gbps()
  rows = []
  for page_size in arg_specs.PAGE_SIZES:
    page_layout = arg_specs.ARG_SPECS[f"llama3.1-8b-tp1-page{page_size}"]
    rates = layout_bench.measure(page_layout, pages=io_bench.GIB // page_layout.page_bytes)
    for direction, gbps in rates.items():
      rows.append(
        {
          "direction": direction,
          "page_size": page_size,
          "gbps": gbps,
          "of_device_copy": gbps / copy_gbps,
        }
      )
      run_folder.say(f"{direction}, page {page_size}: {gbps:.0f} of {copy_gbps:.0f} GB/s")
  return {"device_copy_gbps": copy_gbps, "rows": rows}


def auto_table(summary: dict[str, Any]) -> dict[str, Any]:
  """The table of `io_choice`: rows of its candidates that moved pages of many layers."""
  rows = [
    {key: row[key] for key in ("backend", "direction", "page_bytes", "call_bytes", "gbps")}
    for row in summary["rows"]
    if row["backend"] in io_choice.CANDIDATES
    and row["call"] == "pages"
    and row["page_bytes"] > row["fragment_bytes"]
  ]
  measured_with = {
    "device_kind": run_folder.device_kind(),
    "command": "python -m experiments.io_bandwidth --renew_auto_table",
    "versions": run_folder.versions(),
  }
  return {"measured_with": measured_with, "rows": rows}


def _summary(rows: list[Row], load_gbps: float, store_gbps: float, **more: Any) -> dict[str, Any]:
  return {
    "device_kind": run_folder.device_kind(),
    "ceiling_load_gbps": load_gbps,
    "ceiling_store_gbps": store_gbps,
    **more,
    "rows": rows,
  }


def _line(row: Row) -> str:
  return (
    f"{row['backend']:>18} {row['direction']:>5} fragment {row['fragment_bytes']:>7}"
    f" page {row['page_bytes']:>8} blocks {row['blocks']} {row['gbps']:6.2f} GB/s"
  )


if __name__ == "__main__":
  FLAGS.run(main)
