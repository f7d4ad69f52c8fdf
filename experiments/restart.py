"""Serves, stops, and starts again: what storage gives a new process.

  python -m experiments.restart --weights=smollm2
  python -m experiments.restart --weights=random --model=tiny --document_tokens=200

Takes the flags of `experiments.serve`. One process serves the workload with a store below its host
tier and ends; another, with nothing in memory, serves the same workload. Both write their rows to
folders in --out. `storage_hit_tokens` is what the second found in storage, `outputs_identical` says
whether both gave the same tokens. `ttft_ratio` is the time to the first token from storage over
that of computing everything again, for requests about different documents that come alone to an
empty cache; below 1, storage is faster. All that is stored is read, unless `--min_prefetch_tokens`
says that short runs are to be computed.
"""

import json
import pathlib
import shutil
import subprocess
import sys
from typing import Any

from experiments import flags, measured_costs, run_folder, serve, serve_setup
from strata_jax import metrics

PHASES = ("first", "again")

FLAGS = serve.make_flags(
  "Serves, stops and starts again from storage.", "runs/restart",
  {"min_prefetch_tokens": 1},  # what is there is read, however short the prompts are
)  # fmt: skip
FLAGS.add_flag("phase", str | None, None, "one process only: first, or again")


def main(args: flags.Args) -> int:
  """Runs both processes, or the phase asked for. Returns 1 when outputs differ."""
  if args.phase is not None:
    if args.phase not in PHASES:
      raise flags.UsageError(f"--phase: expected one of {', '.join(PHASES)}, got {args.phase!r}")
    return _serve(args)
  out = pathlib.Path(args.out)
  with flags.usage_errors():
    run_folder.open_run(out, {"flags": args.as_dict(), "seed": args.seed})
  if not args.store:
    shutil.rmtree(out / "store", ignore_errors=True)  # of an earlier run
  given = [f"--tiers={args.tiers or 'shared'}", f"--store={args.store or out / 'store'}"]
  given.append(f"--prefetch={args.prefetch or 'wait_complete'}")
  summaries = {}
  for phase in PHASES:
    run_folder.say(f"process {PHASES.index(phase) + 1} of 2")
    command = [sys.executable, "-m", "experiments.restart", *sys.argv[1:], *given]
    done = subprocess.run(
      [*command, f"--phase={phase}"], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
      return done.returncode  # it has said why
    summaries[phase] = json.loads(done.stdout.splitlines()[-1])
  identical, different = metrics.identical_outputs(
    *(_records(out / phase / "requests.jsonl") for phase in PHASES)
  )
  first, again = summaries["first"], summaries["again"]
  if not again["storage_hit_tokens"]:
    run_folder.say(
      f"nothing was read from the {first['stored_pages']:,} pages stored: runs of fewer than "
      f"--min_prefetch_tokens={args.min_prefetch_tokens} tokens are computed"
    )
  run_folder.finish(
    out,
    {
      "storage_hit_tokens": again["storage_hit_tokens"],
      "outputs_identical": identical,
      "different_requests": different,
      "ttft_ratio": _ratio(again["ttft_storage_s"], again["ttft_recompute_s"]),
      "ttft_storage_s": again["ttft_storage_s"],
      "ttft_recompute_s": again["ttft_recompute_s"],
      "prompt_tokens": again["prompt_tokens"],
      "computed_tokens_first": first["computed_tokens"],
      "computed_tokens_again": again["computed_tokens"],
      "stored_pages": first["stored_pages"],
      "stored_bytes": first["stored_bytes"],
    },
  )
  return 0 if identical else 1


def _serve(args: flags.Args) -> int:
  """One of the processes."""
  setup = serve_setup.set_up(args)
  if setup.storage is None:
    raise flags.UsageError("--tiers: expected a store, local or shared")
  with flags.usage_errors():
    out = run_folder.open_run(
      pathlib.Path(args.out) / args.phase,
      {"flags": args.as_dict(), "seed": args.seed} | setup.configs,
    )
  store = serve_setup.open_store(setup)
  assert store is not None
  executor = serve_setup.make_executor(setup, store)
  serve_setup.warm_up(executor)
  server = serve.Server(setup, executor, measured_costs.of_run(args, setup, executor, store))
  summary: dict[str, Any] = {}
  if args.phase == "again":
    summary |= _ttft(server, setup, args.ttft_visits)
  controller = server.controller()
  result = server.serve(setup.workload.requests, label=args.phase, controller=controller)
  executor.close()
  store.flush()
  usage = store.usage()
  store.close()
  run_folder.write_jsonl(out / "requests.jsonl", (record.row() for record in result.requests))
  summary |= metrics.summarize(result, token_bytes=setup.page_layout.token_bytes)
  summary |= {
    "storage": controller.stats,
    "stored_pages": usage.pages,
    "stored_bytes": usage.bytes,
  }
  run_folder.finish(out, summary)
  return 0


def _ttft(server: serve.Server, setup: serve_setup.Setup, visits: int) -> dict[str, float | None]:
  """Mean TTFT of requests that come alone, computed again and from storage."""
  requests = serve_setup.visits(setup.workload.requests, visits)
  means: dict[str, float | None] = {}
  for name, cached in (("recompute", False), ("storage", True)):
    times = []
    for request in requests:  # each to an empty cache
      controller = server.controller(cached=cached)
      result = server.serve([request], label=f"{name:<9}", controller=controller, one_by_one=True)
      times += [record.ttft_s for record in result.requests if record.ttft_s is not None]
    means[f"ttft_{name}_s"] = sum(times) / len(times) if times else None
  return means


def _ratio(value: float | None, base: float | None) -> float | None:
  return None if value is None or not base else value / base


def _records(path: pathlib.Path) -> list[metrics.RequestRecord]:
  """What a comparison of outputs needs of the rows of a run."""
  records = []
  for line in path.read_text(encoding="utf-8").splitlines():
    row = json.loads(line)
    records.append(
      metrics.RequestRecord(
        row["request_id"], row["prompt_tokens"], outcome=row["outcome"],
        output_ids=row["output_ids"], near_ties=row["near_ties"],
      )
    )  # fmt: skip
  return records


if __name__ == "__main__":
  FLAGS.run(main)
