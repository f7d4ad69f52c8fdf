"""Real serving of several systems at several rates, in one process on one model.

  python -m experiments.throughput --model=llama31_8b --contexts=16 --context_tokens=20000 \\
    --queries=200 --device_tokens=120000 --host_tokens=360000 \\
    --systems=hicache_paper,strata@16 --rates=hicache_paper:4:5:6.25,strata@16:auto:20 --repeats=2
  python -m experiments.throughput --model=tiny ...  # on a CPU, to see that it works
  python -m experiments.throughput --policy=mine.py:schedule ...  # points beside those of strata

Every point serves the same contexts, lengths and (within a repeat) arrival gaps, with questions of
its own, so that nothing but contexts can be hit. `--initial_cache=host_warm` is made by serving
each context once with the real executor: the write policy backs it up, then the device is emptied;
before later points only the device is emptied. A TTFT counts from the scheduled arrival. Systems
whose caches are alike take turns at the same pools. `auto` searches the rates that bracket
`--targets`, a first guess behind it.

`--checked_requests` compares outputs with those of the same requests alone, without a cache.

Writes `config.json`, `points.jsonl` (a line a point), `requests.jsonl.gz`, `steps.jsonl.gz` and
`summary.json` to --out. Run again with the same --out it adds the points that are missing.
`python -m experiments.throughput_table` makes the table of throughput at equal mean TTFT.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from experiments import (
  flags,
  run_folder,
  serve_setup,
  synthetic_flags,
  throughput_folder,
  throughput_plan,
)
from experiments.executor_flags import ExecutorConfig
from experiments.sweeps import throughput
from experiments.synthetic_flags import ShapeConfig
from experiments.throughput_bench import Bench, BenchConfig
from experiments.throughput_folder import PointsFolder
from experiments.throughput_plan import Contender, Point
from strata_jax import config as config_lib
from strata_jax.executors import choices
from strata_jax.models import random
from strata_jax.simulation import SERVING
from strata_jax.workloads import synthetic
from strata_jax.workloads.workload import Workload

COSTS = ("measured", "unknown")
Turn = tuple[Contender, int]  # a system and a repeat

FLAGS = flags.FlagSet("Serves a workload with several systems at several rates.")
FLAGS.add_flag("model", str, "llama31_8b", "preset, with random weights")
FLAGS.add_flag(
  "systems", tuple[str, ...], ("hicache_paper", "strata@16"),
  "NAME or NAME@PAGE_SIZE each, in their order; NAME as `simulate` lists them",
)  # fmt: skip
FLAGS.add_flag(
  "rates", tuple[str, ...], (),
  "SYSTEM:RATE:RATE... or SYSTEM:auto:RATE each, requests a second; SYSTEM as in --systems",
)  # fmt: skip
FLAGS.add_flag(
  "targets", tuple[float, ...], (throughput.HEADLINE,),
  "mean TTFTs, in multiples of T_ref, that auto brackets",
)  # fmt: skip
FLAGS.add_flag(
  "policy", str | None, None,
  "name, FILE.py:NAME or module:NAME: also serves, behind every one of --systems that has strata's "
  "policy, in its place, as 'SYSTEM with FILE.py:NAME'; at the rates of SYSTEM, unless --rates has "
  "that label",
)  # fmt: skip
FLAGS.add_flag("repeats", int, 1, "arrival patterns, each a point at every rate of every system")
FLAGS.add_flag("once", tuple[str, ...], (), "systems that are measured in the first repeat alone")
FLAGS.add_flag("workload", str, "loogle_like", f"one of {', '.join(synthetic.GENERATORS)}")
FLAGS.add(ShapeConfig)
FLAGS.add_flag(
  "initial_cache", str, "host_warm",
  "cold; or host_warm: all contexts are in host memory, the device is empty",
)  # fmt: skip
FLAGS.add_flag("device_tokens", int, 131072, "room in the device pool")
FLAGS.add_flag("host_tokens", int, 393216, "room in the host pool, which must hold all contexts")
FLAGS.add_flag(
  "reference_requests", int | None, None,
  "isolated requests without cache, whose mean TTFT is T_ref; by default one about each context",
)  # fmt: skip
FLAGS.add_flag("costs", str, "measured", "measured: policies see measured costs; or unknown")
FLAGS.add_flag(
  "checked_requests", int, 0,
  "of every point, asked again alone and without cache: their outputs must be the same",
)  # fmt: skip
FLAGS.add_flag("time_limit_s", float, math.inf, "no point begins that would end later than this")
FLAGS.add_flag("point_limit_s", float, 120.0, "a point that lasts longer is cut: not sustained")
FLAGS.add_flag("seed", int, 0, "of weights, lengths, order and arrivals")
FLAGS.add(
  config_lib.ServingConfig,
  defaults={
    "requests_in_flight": SERVING.requests_in_flight,
    "batch_requests": SERVING.batch_requests,
    "step_tokens": SERVING.step_tokens,
    "plan_ahead": True,
  },
)
FLAGS.add(ExecutorConfig)
FLAGS.add_flag("out", str, "runs/throughput", "folder that the run writes or goes on with")


def main(args: flags.Args) -> int:
  """Runs the experiment. Returns 1 when outputs differ that must be the same."""
  began_s = time.monotonic()
  serve_setup.share_the_interpreter()
  contenders = throughput_plan.contenders(args.systems, args.rates, args.policy)
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
  turns = throughput_plan.order(contenders, args.repeats, args.once)
  with flags.usage_errors():
    facts = {"workload": workload.name, "shape": shape}
    policies = {contender.label: contender.policy_digest for contender in contenders}
    folder = PointsFolder(args.out, {"bench": config, **facts}, policies)
  run_folder.say(f"{len(folder.rows)} points are there")
  known_s = throughput_folder.reference_ttft_s(folder.rows)
  measured: dict[str, Any] = {"not_reached": [], "t_ref_s": known_s, "costs": {}}
  if not folder.rows or any(next(_points(args, folder, turn), None) for turn in turns):
    params = jax.block_until_ready(random.random_params(model, args.seed))
    bench = Bench(config, params, workload, contenders)
    measured = _measure(args, bench, folder, turns, began_s)
  run_folder.finish(
    folder.path,
    {
      "points": len(folder.rows),
      **measured,
      "model": model.name,
      "workload": workload.name,
      "contexts": len(workload.contexts),
      "working_set_tokens": sum(len(context) for context in workload.contexts),
      "requests_a_point": len(workload.requests),
      "device_tokens": args.device_tokens,
      "host_tokens": args.host_tokens,
      "kv_bytes_a_token": model.page_layout(1).token_bytes,
      "measured": [_brief(row) for row in folder.rows],
      "wall_s": time.monotonic() - began_s,
      **run_folder.command_facts(),
    },
  )
  wrong = [row for row in folder.rows if row.get("outputs_identical") is False]
  for row in wrong:
    run_folder.say(f"{row['system']} at {row['rate_rps']:g} requests/s, repeat {row['repeat']}: "
                   f"other outputs of requests {row['different_requests']}")  # fmt: skip
  return 1 if wrong else 0


def _measure(
  args: flags.Args, bench: Bench, folder: PointsFolder, turns: Sequence[Turn], began_s: float
) -> dict[str, Any]:
  """Measures what is missing, as far as the time goes."""
  first = min(turns, key=lambda turn: turn[1])[0]
  count = args.reference_requests or max(1, bench.contexts)
  reference = {
    "reference_ttft_s": bench.reference_ttft_s(first, count), "reference_requests": count,
  }  # fmt: skip
  reference_s = throughput_folder.reference_ttft_s([*folder.rows, reference])
  run_folder.say(f"{time.monotonic() - began_s:.0f} s: T_ref is {reference_s:.4f} s")
  not_reached = []
  for turn in turns:
    for point in _points(args, folder, turn, reference_s):
      will_take_s = throughput_plan.expected_s(point, bench.requests, folder.rows)
      if time.monotonic() - began_s + will_take_s > args.time_limit_s:
        not_reached.append(str(point))
        continue
      found = bench.run(point, checked_requests=args.checked_requests)
      row = {**found.row, **reference}
      folder.add(row, found.requests, found.steps)
      run_folder.say(f"{time.monotonic() - began_s:.0f} s: {_line(row)}")
  return {"not_reached": not_reached, "t_ref_s": reference_s, "costs": bench.costs}


def _points(
  args: flags.Args, folder: PointsFolder, turn: Turn, reference_s: float | None = None
) -> Iterator[Point]:
  """What is missing of a turn; one T_ref for all commands of a folder, so that searches go on."""
  if reference_s is None:
    reference_s = throughput_folder.reference_ttft_s(folder.rows)
  assert reference_s is not None
  targets_s = [multiple * reference_s for multiple in args.targets]
  return throughput_plan.points(*turn, folder.rows, targets_s)


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
    value = getattr(args, name)
    if value is not None and value < 1:
      raise flags.UsageError(f"--{name}: expected an integer >= 1, got {value}")
  if args.checked_requests < 0:
    raise flags.UsageError(f"--checked_requests: expected an integer >= 0, got "
                           f"{args.checked_requests}")  # fmt: skip
  if not args.time_limit_s > 0:
    raise flags.UsageError(f"--time_limit_s: expected a number > 0, got {args.time_limit_s}")
  if not 0 < args.point_limit_s < math.inf:
    raise flags.UsageError(
      f"--point_limit_s: expected a finite number > 0, got {args.point_limit_s}"
    )
  if not args.targets or not all(0 < target < math.inf for target in args.targets):
    raise flags.UsageError(f"--targets: expected numbers > 0, got {args.targets}")
  if args.seed < 0:
    raise flags.UsageError(f"--seed: expected an integer >= 0, got {args.seed}")


def _check_sizes(workload: Workload, config: BenchConfig, contender: Contender) -> None:
  cache = config.cache(contender)
  serve_setup.check_sizes(workload.requests, config.model, cache)
  with flags.usage_errors():
    choices.attention_on(
      jax.devices()[0], config.executor.attention, config.model,
      config.model.page_layout(cache.page_size),
    )  # fmt: skip
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
    f"TTFT {text('ttft_mean_s')} s, {text('output_tokens_per_s', '.1f')} tokens/s, "
    f"drained in {text('drain_s', '.1f')} s, lost {row['lost']}, "
    f"hits {row['device_hit_tokens']:,} device {row['host_hit_tokens']:,} host, "
    f"loads {text('load_gbps', '.1f')} GB/s, stall {text('stall_fraction')}, "
    f"bubble {text('bubble_fraction')}, host gap {text('host_gap_ms_median', '.2f')} ms, "
    f"took {row['wall_s']:.1f} s"
  )


if __name__ == "__main__":
  FLAGS.run(main)
