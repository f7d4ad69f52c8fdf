"""Real serving of several systems at several rates, in one process on one model.

  python -m experiments.throughput --model=llama31_8b --contexts=16 --context_tokens=20000 \\
    --queries=200 --device_tokens=120000 --host_tokens=360000 \\
    --systems=hicache_paper,strata@16 --rates=hicache_paper:4:5:6.25,strata@16:16:20:25 --repeats=2
  python -m experiments.throughput --model=tiny ...  # on a CPU, to see that it works

Every point serves the same contexts, lengths and (within a repeat) arrival gaps, with questions of
its own, so that nothing but contexts can be hit. `--initial_cache=host_warm` is made by serving
each context once with the real executor: the write policy backs it up, then the device is emptied;
before later points only the device is emptied. A TTFT counts from the scheduled arrival. Systems
whose caches are alike take turns at the same pools.

Writes `config.json`, `points.jsonl` (a line a point), `requests.jsonl.gz`, `steps.jsonl.gz` and
`summary.json` to --out. Run again with the same --out it adds the points that are missing.
`python -m experiments.throughput_table` makes the table of throughput at equal mean TTFT.
"""

import math
import time
from typing import Any

import jax

from experiments import flags, run_folder, serve_setup, synthetic_flags, throughput_plan
from experiments.executor_flags import ExecutorConfig
from experiments.synthetic_flags import ShapeConfig
from experiments.throughput_bench import Bench, BenchConfig
from experiments.throughput_folder import PointsFolder
from strata_jax import config as config_lib
from strata_jax.models import random
from strata_jax.simulation import SERVING
from strata_jax.workloads import synthetic
from strata_jax.workloads.workload import Workload

COSTS = ("measured", "unknown")

FLAGS = flags.FlagSet("Serves a workload with several systems at several rates.")
FLAGS.add_flag("model", str, "llama31_8b", "preset, with random weights")
FLAGS.add_flag(
  "systems", tuple[str, ...], ("hicache_paper", "strata@16"),
  "NAME or NAME@PAGE_SIZE each, in their order; NAME as `simulate` lists them",
)  # fmt: skip
FLAGS.add_flag(
  "rates",
  tuple[str, ...],
  (),
  "SYSTEM:RATE:RATE... each, requests a second; SYSTEM as in --systems",
)
FLAGS.add_flag("repeats", int, 1, "arrival patterns, each a point at every rate of every system")
FLAGS.add_flag("workload", str, "loogle_like", f"one of {', '.join(synthetic.GENERATORS)}")
FLAGS.add(ShapeConfig)
FLAGS.add_flag(
  "initial_cache", str, "host_warm",
  "cold; or host_warm: all contexts are in host memory, the device is empty",
)  # fmt: skip
FLAGS.add_flag("device_tokens", int, 131072, "room in the device pool")
FLAGS.add_flag("host_tokens", int, 393216, "room in the host pool, which must hold all contexts")
FLAGS.add_flag("reference_requests", int, 3, "isolated requests without cache, whose TTFT is T_ref")
FLAGS.add_flag("costs", str, "measured", "measured: policies see measured costs; or unknown")
FLAGS.add_flag("time_limit_s", float, math.inf, "no point begins that would end later than this")
FLAGS.add_flag("point_limit_s", float, 120.0, "a point that lasts longer is cut: not sustained")
FLAGS.add_flag("seed", int, 0, "of weights, lengths, order and arrivals")
FLAGS.add(
  config_lib.ServingConfig,
  defaults={
    "requests_in_flight": SERVING.requests_in_flight,
    "batch_requests": SERVING.batch_requests,
    "step_tokens": SERVING.step_tokens,
  },
)
FLAGS.add(ExecutorConfig)
FLAGS.add_flag("out", str, "runs/throughput", "folder that the run writes or goes on with")


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  began_s = time.monotonic()
  contenders = throughput_plan.contenders(args.systems, args.rates)
  _check(args)
  shape = args.config(ShapeConfig)
  model = config_lib.MODELS[args.model]
  workload = synthetic_flags.generate(args.workload, shape, args.seed)
  config = BenchConfig(
    model=model,
    device_tokens=args.device_tokens,
    host_tokens=args.host_tokens,
    serving=args.config(config_lib.ServingConfig),
    executor=args.config(ExecutorConfig),
    initial_cache=args.initial_cache,
    with_costs=args.costs == "measured",
    point_limit_s=args.point_limit_s,
    seed=args.seed,
  )
  for contender in contenders:
    _check_sizes(workload, config, contender)
  with flags.usage_errors():
    facts = {"workload": workload.name, "shape": shape, "reference": args.reference_requests}
    folder = PointsFolder(args.out, {"bench": config, **facts})
  wanted = throughput_plan.order(contenders, args.repeats)
  points = [point for point in wanted if not folder.has(point)]
  run_folder.say(f"{len(points)} points to measure, {len(wanted) - len(points)} are there")
  reference_s, not_reached, costs = None, [], {}
  if points:
    params = jax.block_until_ready(random.random_params(model, args.seed))
    bench = Bench(config, params, workload, contenders)
    reference_s = bench.reference_ttft_s(contenders[0], args.reference_requests)
    run_folder.say(f"T_ref is {reference_s:.4f} s")
    for point in points:
      run_s = len(workload.requests) / point.rate_rps
      if time.monotonic() - began_s + run_s > args.time_limit_s:
        not_reached.append(str(point))
        continue
      measured = bench.run(point)
      row = {**measured.row, "reference_ttft_s": reference_s}
      folder.add(row, measured.requests, measured.steps)
      run_folder.say(_line(row))
    costs = bench.costs
  run_folder.finish(
    folder.path,
    {
      "points": len(folder.rows),
      "not_reached": not_reached,
      "t_ref_s": reference_s,
      "model": model.name,
      "workload": workload.name,
      "contexts": len(workload.contexts),
      "working_set_tokens": sum(len(context) for context in workload.contexts),
      "requests_a_point": len(workload.requests),
      "device_tokens": args.device_tokens,
      "host_tokens": args.host_tokens,
      "kv_bytes_a_token": model.page_layout(1).token_bytes,
      "costs": costs,
      "measured": [_brief(row) for row in folder.rows],
      "wall_s": time.monotonic() - began_s,
      **run_folder.command_facts(),
    },
  )


def _check(args: flags.Args) -> None:
  """Refuses values that no config checks."""
  choices = (
    ("model", tuple(config_lib.MODELS)), ("initial_cache", serve_setup.INITIAL_CACHES),
    ("costs", COSTS),
  )  # fmt: skip
  for name, expected in choices:
    if getattr(args, name) not in expected:
      raise flags.UsageError(
        f"--{name}: expected one of {', '.join(expected)}, got {getattr(args, name)!r}"
      )
  for name in ("repeats", "reference_requests"):
    if getattr(args, name) < 1:
      raise flags.UsageError(f"--{name}: expected an integer >= 1, got {getattr(args, name)}")
  for name in ("time_limit_s", "point_limit_s"):
    if not getattr(args, name) > 0:
      raise flags.UsageError(f"--{name}: expected a number > 0, got {getattr(args, name)}")
  if args.seed < 0:
    raise flags.UsageError(f"--seed: expected an integer >= 0, got {args.seed}")


def _check_sizes(
  workload: Workload, config: BenchConfig, contender: throughput_plan.Contender
) -> None:
  cache = config.cache(contender)
  serve_setup.check_sizes(workload.requests, config.model, cache)
  if config.serving.step_tokens < cache.page_size:
    raise flags.UsageError(
      f"--step_tokens: expected at least a page of {cache.page_size}, "
      f"got {config.serving.step_tokens}"
    )
  if config.initial_cache == "cold" or not cache.host_pages:
    return
  if not workload.contexts:
    raise flags.UsageError(
      f"--initial_cache=host_warm: expected a workload with contexts, got {workload.name}"
    )
  pages = sum(len(context) // cache.page_size for context in workload.contexts)
  if pages > cache.host_pages:
    raise flags.UsageError(
      f"--host_tokens: expected room for all contexts, {pages * cache.page_size} tokens, "
      f"got {config.host_tokens}"
    )


_BRIEF = (
  "system", "rate_rps", "repeat", "ttft_mean_s", "output_tokens_per_s", "drain_s", "lost",
  "device_hit_tokens", "host_hit_tokens", "computed_tokens", "load_gbps", "stall_fraction",
  "bubble_fraction", "host_gap_ms_median", "recompiles", "warmed_contexts", "wall_s",
)  # fmt: skip


def _brief(row: dict[str, Any]) -> dict[str, Any]:
  return {key: row[key] for key in _BRIEF}


def _line(row: dict[str, Any]) -> str:
  """The main numbers of a point for whoever watches."""

  def text(name: str, form: str = ".3f") -> str:
    return "-" if row[name] is None else format(row[name], form)

  return (
    f"  TTFT {text('ttft_mean_s')} s, {text('output_tokens_per_s', '.1f')} tokens/s, "
    f"drained in {text('drain_s', '.1f')} s, lost {row['lost']}, "
    f"hits {row['device_hit_tokens']:,} device {row['host_hit_tokens']:,} host, "
    f"loads {text('load_gbps', '.1f')} GB/s, stall {text('stall_fraction')}, "
    f"bubble {text('bubble_fraction')}, host gap {text('host_gap_ms_median', '.2f')} ms, "
    f"took {row['wall_s']:.1f} s"
  )


if __name__ == "__main__":
  FLAGS.run(main)
