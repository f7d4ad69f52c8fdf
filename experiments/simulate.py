"""Simulates a system serving a workload on a machine it does not have.

  python -m experiments.simulate --workload=loogle_like --model=llama31_8b --hardware=h200 \\
    --system=strata --initial_cache=host_warm --request_rate=20
  python -m experiments.simulate --trace=conversation_trace.jsonl --trace_format=mooncake \\
    --system=strata --page_size=16 --arrival_speedup=0.1

The Mooncake traces overload one H200 at their own speed: `saturated` says so; slow them down with
`--arrival_speedup` below 1. Writes `config.json`, `requests.jsonl`, `steps.jsonl`, `summary.json`
and `waterfall.png` to --out. The same flags give the same rows, byte for byte.
"""

import contextlib
import dataclasses
import resource
import time
from typing import Any

from experiments import flags, plots, run_folder, workload_flags
from experiments.measured_run import SHAPES
from strata_jax import metrics, profile, recording, systems
from strata_jax import simulation as sim
from strata_jax.config import CacheConfig, ServingConfig
from strata_jax.executors.buckets import Buckets, make_buckets
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.tiers.layout import PageLayout
from strata_jax.workloads.workload import Workload, output_tokens

FLAGS = flags.FlagSet("Simulates a system serving a workload.")
workload_flags.add(FLAGS)
FLAGS.add_flag("model", str, "llama31_8b", "model of the profile")
FLAGS.add_flag(
  "hardware", str, "h200", f"of a profile <hardware>_<model>: {', '.join(profile.names())}"
)
FLAGS.add_flag("profile_folder", str | None, None, "folder of the profile; none: the package's own")
FLAGS.add_flag("system", str, "strata", f"one of {', '.join(systems.SYSTEMS)}")
FLAGS.add_flag("policy", str | None, None, "name, FILE.py:NAME or module:NAME; none: the system's")
FLAGS.add_flag("page_size", int | None, None, "tokens of a page; none: the system's")
FLAGS.add_flag("write_policy", str | None, None, "what goes down when; none: the system's")
FLAGS.add_flag(
  "store", str | None, None,
  "storage below the host, at the profile's cost: any name; without, as the system says",
)  # fmt: skip
FLAGS.add_flag(
  "piece_tokens", int | None, None,
  "prefills are cut and padded to pieces of at most so many tokens, as by the real executor",
)  # fmt: skip
FLAGS.add_flag("prefill_rows", int, 1, "with --piece_tokens: pieces computed together at most")
FLAGS.add_flag("row_factor", int, 4, "with --piece_tokens: factor between batches' numbers of rows")
FLAGS.add_flag(
  "joint_tokens", int, 0,
  "with --piece_tokens: padded tokens of a prefill batch that decodes share a pass with, at most",
)  # fmt: skip
FLAGS.add_flag("initial_cache", str, "cold", f"one of {', '.join(sim.INITIAL_CACHES)}")
FLAGS.add(sim.PoolSizes)
FLAGS.add(
  ServingConfig,
  defaults={
    field.name: getattr(sim.SERVING, field.name) for field in dataclasses.fields(ServingConfig)
  },
)
FLAGS.add(SchedulerConfig, skip=("layerwise", "min_load_tokens"))
FLAGS.add_flag("slo_ttft_s", float | None, None, "a good request's TTFT is at most this")
FLAGS.add_flag("slo_tpot_s", float | None, None, "a good request's TPOT is at most this")
FLAGS.add_flag("record", str | None, None, "file for every view and plan: .jsonl or .jsonl.gz")
FLAGS.add_flag("out", str, "runs/simulate", "folder that the run writes")


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  began_s = time.perf_counter()
  flags.check_folder("profile_folder", args.profile_folder)
  with flags.usage_errors():
    machine = sim.find_profile(args.hardware, args.model, args.profile_folder or profile.FOLDER)
    workload = workload_flags.workload(args)
    for name in ("slo_ttft_s", "slo_tpot_s"):
      if getattr(args, name) is not None and not getattr(args, name) > 0:
        raise ValueError(f"--{name}: expected a number > 0, got {getattr(args, name)}")
    system = _system(args)
    serving = args.config(ServingConfig)
    pools = args.config(sim.PoolSizes)
    cache = sim.cache_config(system, machine, workload, pools)
    shapes = _shapes(args, cache, serving, workload)
    out = run_folder.open_run(
      args.out,
      {
        "flags": args.as_dict(), "seed": args.seed, "system": system, "serving": serving,
        "scheduler": system.scheduler_config, "cache": cache, "profile": machine.name,
        "profile_numbers": {
          key: {"kind": kind, "source": source} for key, kind, source in profile.numbers(machine)
        },
      },
    )  # fmt: skip
    with (
      _recorder(args, system) as record,
      run_folder.Progress(len(workload.requests), "simulate") as bar,
    ):
      run = sim.simulate(
        workload, machine, system, policy=args.policy, serving=serving, pools=pools,
        initial_cache=args.initial_cache, recorder=record,
        progress=lambda done, _: bar.update(done), buckets=shapes,
      )  # fmt: skip
  result = run.result
  run_folder.write_jsonl(out / "requests.jsonl", (request_row(r) for r in result.requests))
  run_folder.write_jsonl(out / "steps.jsonl", result.steps)
  summary = {
    "workload": workload.name,
    "system": system.name,
    "policy": args.policy or system.policy,
    "profile": machine.name,
    "page_size": system.page_size,
    "device_tokens": cache.device_tokens,
    "host_tokens": cache.host_tokens,
    "storage": system.storage,
    "initial_cache": args.initial_cache,
    "seed": args.seed,
    **run.summary(slo_ttft_s=args.slo_ttft_s, slo_tpot_s=args.slo_tpot_s),
    **{f"workload_{key}": value for key, value in workload.notes.items()},
    "isolated_ttft_s": sim.isolated_ttft_s(workload, run.costs, serving),
    "wall_s": time.perf_counter() - began_s,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
  }
  plots.waterfall(out / "waterfall.png", result.requests)
  run_folder.finish(out, summary)


def request_row(record: metrics.RequestRecord) -> dict[str, Any]:
  """The request's row without its output ids, which the workload forced anyhow."""
  row = record.row()
  del row["output_ids"], row["near_ties"]
  return row


def _system(args: flags.Args) -> systems.SystemConfig:
  """The preset with what flags say otherwise."""
  system = systems.system(args.system)
  scheduler = args.config(SchedulerConfig, base=system.scheduler)
  changes: dict[str, Any] = {"scheduler": scheduler}
  if args.page_size is not None:
    changes["page_size"] = args.page_size
  if args.write_policy is not None:
    changes["write_policy"] = args.write_policy
  if args.store is not None and system.storage == "none":
    if not system.host:
      raise ValueError(f"--store: expected a system with a host tier, got --system={system.name}")
    changes["storage"] = "private"
  return dataclasses.replace(system, **changes)


def _shapes(
  args: flags.Args, cache: CacheConfig, serving: ServingConfig, workload: Workload
) -> Buckets | None:
  if args.piece_tokens is None:
    if args.joint_tokens:
      raise ValueError(
        f"--joint_tokens: expected 0 without --piece_tokens, got {args.joint_tokens}"
      )
    return None
  for name, least in SHAPES.items():
    if getattr(args, name) < least:
      raise ValueError(f"--{name}: expected an integer >= {least}, got {getattr(args, name)}")
  return make_buckets(
    PageLayout(num_layers=1, page_size=cache.page_size, kv_heads=1, head_dim=1, dtype="bfloat16"),
    serving, device_pages=cache.device_pages, piece_tokens=args.piece_tokens,
    context_tokens=max(len(r.prompt_ids) + output_tokens(r) for r in workload.requests),
    prefill_rows=args.prefill_rows, row_factor=args.row_factor, joint_tokens=args.joint_tokens,
  )  # fmt: skip


def _recorder(
  args: flags.Args, system: systems.SystemConfig
) -> contextlib.AbstractContextManager[recording.Recorder | None]:
  if args.record is None:
    return contextlib.nullcontext()
  return recording.Recorder(
    args.record, policy=args.policy or system.policy, config=system.scheduler_config
  )


if __name__ == "__main__":
  FLAGS.run(main)
