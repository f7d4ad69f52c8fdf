"""A folder of `throughput` whose points a simulated machine served."""

import dataclasses

from experiments import throughput_plan
from experiments.executor_flags import ExecutorConfig
from experiments.synthetic_flags import ShapeConfig, generate
from experiments.throughput_bench import BenchConfig
from experiments.throughput_folder import PointsFolder
from strata_jax import config, simulation
from strata_jax.executors.buckets import make_buckets
from strata_jax.scheduler.views import Costs
from strata_jax.workloads import arrivals

SERVING = config.ServingConfig(requests_in_flight=64, batch_requests=16, step_tokens=8192)
POOLS = simulation.PoolSizes(device_tokens=24_000, host_tokens=80_000)
SHAPE = ShapeConfig(contexts=12, context_tokens=4000.0, queries=150)
EXECUTOR = ExecutorConfig(prefill_rows=4)
SEED = 3


def buckets(page_size, workload, executor):
  """The shapes of an executor of that config."""
  longest = max(len(r.prompt_ids) + r.max_new_tokens for r in workload.requests)
  return make_buckets(
    config.MODELS["llama31_8b"].page_layout(page_size), SERVING,
    device_pages=POOLS.device_tokens // page_size, context_tokens=longest,
    piece_tokens=executor.piece_tokens, prefill_rows=executor.prefill_rows,
    joint_tokens=executor.joint_tokens,
  )  # fmt: skip


def write(
  out, machine, systems, rates, *, policy=None, repeats=1, shape=SHAPE, shown=None,
  executor=EXECUTOR,
):  # fmt: skip
  """Serves all points on `machine`, a profile. `shown`: the costs that policies see, if any."""
  contenders = throughput_plan.contenders(systems, rates, policy)
  bench = BenchConfig(
    model=config.MODELS["llama31_8b"], device_tokens=POOLS.device_tokens,
    host_tokens=POOLS.host_tokens, serving=SERVING, executor=executor,
    initial_cache="host_warm", with_costs=shown is not None, point_limit_s=60.0, seed=SEED,
  )  # fmt: skip
  plain = generate("loogle_like", shape, SEED)
  folder = PointsFolder(out, {"bench": bench, "workload": plain.name, "shape": shape})
  wanted = [
    (contender, point)
    for contender, repeat in throughput_plan.order(contenders, repeats)
    for point in throughput_plan.points(contender, repeat, (), ())
  ]
  for contender, point in wanted:
    found = arrivals.poisson(plain, point.rate_rps, SEED + point.repeat)
    times = [r.arrival_s for r in found.requests]
    limited = found.with_requests(
      dataclasses.replace(r, abort_s=max(0.0, 60.0 - r.arrival_s)) for r in found.requests
    )
    run = simulation.simulate(
      limited, machine, contender.system, serving=SERVING, pools=POOLS, initial_cache="host_warm",
      shown_costs=shown or Costs(), whole_decodes=True,
      buckets=buckets(contender.system.page_size, plain, executor), policy=contender.policy,
    )  # fmt: skip
    summary = run.summary()
    row = {
      "system": point.label, "policy": contender.policy_name,
      "policy_digest": contender.policy_digest, "rate_rps": point.rate_rps, "repeat": point.repeat,
      "decode_shares": machine.executor.decode_shares, "page_size": contender.system.page_size,
      "device_tokens": POOLS.device_tokens, "host_tokens": POOLS.host_tokens, **summary,
      "lost": summary["refused"] + summary["aborted"], "host_gap_ms_median": None,
      "arrival_span_s": max(times) - min(times), "reference_ttft_s": 0.25,
    }  # fmt: skip
    if shown is not None:
      row["costs"] = dataclasses.asdict(shown)
    requests = [record.row() for record in run.result.requests]
    folder.add(row, requests, [step._asdict() for step in run.result.steps])
  return folder.path
