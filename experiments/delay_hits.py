"""How the hit rate falls when blocks need time to be computed (delay hits).

  python -m experiments.delay_hits --workload=loogle_like --rates=1,10,100 \\
    --resolve_ms=0,1,3,10,30,100,300,1000

An infinite cache and no queue: a block is ready at arrival + resolve_ms x computed tokens / 1000.
Hit rates are normalised by the one without resolve time. Poisson arrivals; a trace keeps its order.
"""

import time
from typing import Any

from experiments import flags, plots, run_folder, workload_flags
from strata_jax import delay_hits
from strata_jax.workloads import arrivals

FLAGS = flags.FlagSet("Simulates delay hits on an infinite cache.")
workload_flags.add(FLAGS, with_arrivals=False)
FLAGS.add_flag("rates", tuple[float, ...], (1.0, 10.0, 100.0), "requests a second")
FLAGS.add_flag(
  "resolve_ms", tuple[float, ...], (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
  "milliseconds to compute 1,000 tokens",
)  # fmt: skip
FLAGS.add_flag("block_tokens", int, 64, "tokens of a block")
FLAGS.add_flag("out", str, "runs/delay_hits", "folder that the run writes")


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  began_s = time.perf_counter()
  with flags.usage_errors():
    workload = workload_flags.workload(args, with_arrivals=False)
    if args.block_tokens < 1:
      raise ValueError(f"--block_tokens: expected an integer >= 1, got {args.block_tokens}")
    for name, minimum in (("rates", 1e-9), ("resolve_ms", 0.0)):
      if not getattr(args, name) or min(getattr(args, name)) < minimum:
        raise ValueError(f"--{name}: expected numbers >= {minimum}, got {getattr(args, name)}")
    out = run_folder.open_run(args.out, {"flags": args.as_dict(), "seed": args.seed})
  blocks, distinct = delay_hits.block_ids(workload, args.block_tokens)
  prompt_tokens = [len(request.prompt_ids) for request in workload.requests]
  gaps = arrivals.unit_gaps(len(prompt_tokens), args.seed).cumsum()

  def run(rate_rps: float, resolve_ms: float) -> delay_hits.DelayHits:
    return delay_hits.simulate(
      blocks, distinct, prompt_tokens, (gaps / rate_rps).tolist(),
      block_tokens=args.block_tokens, resolve_s_per_token=resolve_ms / 1e6,
    )  # fmt: skip

  rows: list[dict[str, Any]] = []
  for rate_rps in args.rates:
    base = run(rate_rps, 0.0).hit_rate
    for resolve_ms in args.resolve_ms:
      found = run(rate_rps, resolve_ms)
      rows.append(
        {
          "rate_rps": rate_rps,
          "resolve_ms": resolve_ms,
          "hit_rate": found.hit_rate,
          "delay_hit_rate": found.delay_hit_tokens / found.input_tokens,
          "normalised_hit_rate": found.hit_rate / base if base else None,
        }
      )
  run_folder.write_jsonl(out / "rows.jsonl", rows)
  plots.lines(
    out / "delay_hits.png",
    {
      f"{rate:g} requests/s": (
        [row["resolve_ms"] for row in rows if row["rate_rps"] == rate],
        [row["normalised_hit_rate"] or 0.0 for row in rows if row["rate_rps"] == rate],
      )
      for rate in args.rates
    },
    "milliseconds to compute 1,000 tokens", "hit rate / hit rate without resolve time",
  )  # fmt: skip
  run_folder.finish(
    out,
    {
      "workload": workload.name,
      "requests": len(workload.requests),
      "seed": args.seed,
      "rows": rows,
      "wall_s": time.perf_counter() - began_s,
    },
  )


if __name__ == "__main__":
  FLAGS.run(main)
