"""How fast the JAX executor computes, and how much of a load it hides.

  python -m experiments.executor_bench
  XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false" \\
    python -m experiments.executor_bench --page_sizes=16  # compiles in seconds

Drives the executor alone, no serving loop: a step with the prefills of some prompts, a step of
decodes of a batch, and a prefill with a load beside it, by several ways to load. What the device
does at best is measured in the same run: one large matrix product and one large copy. Without a GPU
a tiny model shows that all of it runs.

Rows of `beside` and `beside_decode`: `load_ms` and `compute_ms` are the two alone, `both_ms` is the
step with both, `stall_ms` how long its compute waited for the load (see `StepDone.stall_s`);
`over_max` is both_ms over the larger one. The first layer's load is hidden by nothing, which leaves
1 + 1 / layers at best where the load is the larger one.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import flags, model_bench, run_folder
from strata_jax import config as config_lib
from strata_jax.executors import jax_executor, protocol
from strata_jax.executors.buckets import Buckets
from strata_jax.models import build, random
from strata_jax.pallas_kernels import timing

_LOADS = ("kernel/layer", "kernel/whole", "copy_engine/layer", "memcpy_async/layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
  """What is run."""

  model: str = "llama31_8b"  # preset, with random weights
  page_sizes: tuple[int, ...] = (16, 1)  # tokens of a page
  prefill_prompts: int = 4  # prompts of one step
  prefill_tokens: int = 4096  # tokens a prompt
  decode_batch: int = 16  # sequences that decode
  decode_context: int = 4096  # tokens of context a sequence
  decode_steps: int = 8  # steps in one launch
  loads: tuple[str, ...] = _LOADS  # I/O back end/overlap; the first runs prefill and decode, too
  beside_tokens: tuple[int, ...] = (1024, 4096)  # tokens computed while a load runs
  load_tokens: tuple[int, ...] = (4096, 16384)  # tokens loaded beside them
  layers_per_program: tuple[int, ...] = (1,)  # layers of program 1, 2, ...; the last: of all others
  rounds: int = 5  # measurements, of which the median is taken
  seed: int = 0  # of weights, prompts and slots

  def __post_init__(self) -> None:
    model_bench.check(self)


FLAGS = flags.FlagSet("Measures the JAX executor: prefill, decode, loads beside them.")
FLAGS.add(BenchConfig)
FLAGS.add_flag("out", str, "runs/executor_bench", "folder that the run writes")

_TINY = BenchConfig(
  model="tiny", page_sizes=(4,), loads=("auto/layer", "auto/whole"), prefill_prompts=2,
  prefill_tokens=32, decode_batch=2, decode_context=32, decode_steps=2, beside_tokens=(16,),
  load_tokens=(32,), rounds=2,
)  # fmt: skip


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  config, out = model_bench.begin(args, "bench", BenchConfig, _TINY)
  run_folder.finish(out, measure(config))


def measure(config: BenchConfig) -> dict[str, Any]:
  """All rows, and the rates of the device in the same run."""
  model = config_lib.MODELS[config.model]
  rates = device_rates()
  run_folder.say(f"rates: {rates}")
  params = jax.block_until_ready(random.random_params(model, config.seed))
  run_folder.say("weights are drawn")
  summary: dict[str, Any] = {
    "device_kind": run_folder.device_kind(),
    "model": model.name,
    "rates": rates,
    "prefill": [],
    "decode": [],
    "beside": [],
    "beside_decode": [],
  }
  for page_size in config.page_sizes:
    for number, loads in enumerate(config.loads):
      bench = Bench(config, params, page_size, loads)
      if number == 0:
        summary["decode"].append(bench.decode(rates["copy_gbps"]))
        if page_size == config.page_sizes[0]:
          summary["prefill"].append(bench.prefill(rates["matmul_tflops"]))
      for load_tokens in config.load_tokens:
        for tokens in config.beside_tokens:
          summary["beside"].append(bench.beside(tokens, load_tokens))
        summary["beside_decode"].append(bench.beside_decode(load_tokens))
      del bench  # its pools
  return summary


def device_rates() -> dict[str, float]:
  """One large product of matrices, bfloat16, and one large copy, counting reads and writes."""
  on_gpu = jax.default_backend() == "gpu"
  size, copied = (8192, 1 << 32) if on_gpu else (256, 1 << 20)
  x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
  product = jax.jit(lambda x: x @ x)
  data = jnp.zeros(copied // 4, jnp.float32)
  copy = jax.jit(lambda x: x + 1)
  return {
    "matmul_tflops": 2 * size**3 / timing.seconds_a_call(lambda: product(x)) / 1e12,
    "copy_gbps": 2 * data.nbytes / timing.seconds_a_call(lambda: copy(data)) / 1e9,
  }


class _Timed(NamedTuple):
  """Medians, in seconds."""

  step_s: float  # from the launch to the last event
  launch_s: float  # what the host needs for it
  stall_s: float  # how long the compute waited for loads


class Bench:
  """An executor, and the steps that are timed."""

  def __init__(self, config: BenchConfig, params: Any, page_size: int, loads: str) -> None:
    self._config = config
    self._model = config_lib.MODELS[config.model]
    self._layout = self._model.page_layout(page_size)
    self._loads = loads
    io, overlap = loads.split("/")
    self._pages = lambda tokens: -(-tokens // page_size)
    most_loaded, most_beside = max(config.load_tokens), max(config.beside_tokens)
    decode_tokens = config.decode_context + config.decode_steps
    contexts = (config.prefill_tokens, decode_tokens, most_loaded + most_beside)
    device_pages = max(
      config.prefill_prompts * self._pages(config.prefill_tokens),
      config.decode_batch * self._pages(decode_tokens),
      self._pages(most_loaded + most_beside),
    )
    self._executor = jax_executor.JaxExecutor(
      self._model,
      params,
      self._layout,
      device_pages=device_pages,
      host_pages=self._pages(most_loaded),
      buckets=Buckets(
        chunk_tokens=tuple(sorted({*config.beside_tokens, config.prefill_tokens})),
        decode_requests=(config.decode_batch,),
        transfer_pages=(self._pages(most_loaded),),
        table_pages=max(map(self._pages, contexts)),
      ),
      io=io,
      overlap=overlap,
      layers_per_program=config.layers_per_program,
    )
    self._rng = np.random.default_rng(config.seed)
    self._slots = self._rng.permutation(device_pages).astype(np.int32)
    self._steps = 0
    for request_id in range(max(config.prefill_prompts, config.decode_batch)):
      self._executor.register(request_id, protocol.SamplingParams(), None)

  def prefill(self, matmul_tflops: float) -> dict[str, Any]:
    """Some cold prompts in one step."""
    tokens, prompts = self._config.prefill_tokens, self._config.prefill_prompts
    tables = self._tables(prompts, tokens)
    works = tuple(self._prefill_work(i, tokens, 0, table) for i, table in enumerate(tables))
    seconds, host_s, _ = self._time(lambda: {"prefills": works})
    tflops = prompts * self._flops(tokens) / seconds / 1e12
    row = {
      "page_size": self._layout.page_size,
      "prompts": prompts,
      "tokens": tokens,
      "ms": seconds * 1e3,
      "launch_ms": host_s * 1e3,
      "tflops": tflops,
      "of_matmul_rate": tflops / matmul_tflops,
    }
    run_folder.say(f"prefill: {row}")
    return row

  def decode(self, copy_gbps: float) -> dict[str, Any]:
    """Decode steps of a batch."""
    batch, context, steps = (
      self._config.decode_batch,
      self._config.decode_context,
      self._config.decode_steps,
    )
    works = self._decode_works()
    seconds = self._time(lambda: {"decodes": works, "decode_steps": steps}).step_s
    # Of one step: a device takes only some 32 programs ahead, after that a launch waits for it.
    host_s = self._time(lambda: {"decodes": works}).launch_s
    kv_bytes = batch * context * self._layout.token_bytes
    least_s = (self._weight_bytes() + kv_bytes) / copy_gbps / 1e9
    row = {
      "page_size": self._layout.page_size,
      "batch": batch,
      "context": context,
      "ms": seconds / steps * 1e3,
      "launch_ms": host_s * 1e3,
      "bytes": self._weight_bytes() + kv_bytes,
      "over_memory_time": seconds / steps / least_s,
    }
    run_folder.say(f"decode: {row}")
    return row

  def beside(self, tokens: int, load_tokens: int) -> dict[str, Any]:
    """A prefill of `tokens` behind a context of `load_tokens`, whose KV is loaded meanwhile."""
    (table,) = self._tables(1, load_tokens + tokens)
    load = self._load_work(table, load_tokens)
    work = self._prefill_work(0, tokens, load_tokens, table)
    both = dataclasses.replace(work, waits_for=(1,))
    compute = self._time(lambda: {"prefills": (work,)})
    alone = self._time(lambda: {"loads": (load,)})
    together = self._time(lambda: {"loads": (load,), "prefills": (both,)})
    return self._beside_row("prefill", tokens, load, compute, alone, together)

  def beside_decode(self, load_tokens: int) -> dict[str, Any]:
    """One decode step of the batch, and a load that nobody in it waits for."""
    load = self._load_work(self._slots, load_tokens)  # over pages of the batch: no matter here
    works = self._decode_works()
    compute = self._time(lambda: {"decodes": works})
    alone = self._time(lambda: {"loads": (load,)})
    both = self._time(lambda: {"loads": (load,), "parked_loads": (1,), "decodes": works})
    return self._beside_row("decode", len(works), load, compute, alone, both)

  def _beside_row(
    self, name: str, tokens: int, load: protocol.LoadWork, compute: _Timed, alone: _Timed,
    both: _Timed,
  ) -> dict[str, Any]:  # fmt: skip
    load_bytes = len(load.host_slots) * self._layout.page_bytes
    row = {
      "page_size": self._layout.page_size,
      "loads": self._loads,
      "tokens": tokens,
      "load_tokens": load.tokens,
      "compute_ms": compute.step_s * 1e3,
      "load_ms": alone.step_s * 1e3,
      "both_ms": both.step_s * 1e3,
      "launch_ms": both.launch_s * 1e3,
      "stall_ms": both.stall_s * 1e3,
      "over_max": both.step_s / max(compute.step_s, alone.step_s),
      "load_gbps": load_bytes / alone.step_s / 1e9,
      "load_gbps_beside": load_bytes / both.step_s / 1e9,
    }
    run_folder.say(f"beside {name}: {row}")
    return row

  def _time(self, make: Callable[[], dict[str, Any]]) -> _Timed:
    times: list[_Timed] = []
    for _ in range(self._config.rounds + 2):  # the first two compile
      work = protocol.StepWork(step_id=self._steps, **make())
      self._steps += 1
      started_s = time.perf_counter()
      begun_s = self._executor.now_s()
      self._executor.launch(work)
      launch_s = time.perf_counter() - started_s
      events: list[protocol.Event] = []
      while len(events) < len(work.loads) + work.computes:
        events += self._executor.wait(None)
      stall_s = sum(event.stall_s for event in events if isinstance(event, protocol.StepDone))
      times.append(_Timed(events[-1].at_s - begun_s, launch_s, stall_s))
    return _Timed(*map(statistics.median, zip(*times[2:], strict=True)))

  def _load_work(self, table: np.ndarray, tokens: int) -> protocol.LoadWork:
    """A load of so many tokens from random places to the first pages of a table."""
    host, pages = self._executor.host_pool, tokens // self._layout.page_size
    assert host is not None
    host_slots = self._rng.permutation(host.shape[0])[:pages].astype(np.int32)
    return protocol.LoadWork(
      transfer_id=1, request_id=0, node_ids=(), host_slots=host_slots, device_slots=table[:pages],
      tokens=tokens,
    )  # fmt: skip

  def _decode_works(self) -> tuple[protocol.DecodeWork, ...]:
    context = self._config.decode_context
    tables = self._tables(self._config.decode_batch, context + self._config.decode_steps)
    return tuple(
      protocol.DecodeWork(request_id=i, token_id=1, position=context, page_table=table)
      for i, table in enumerate(tables)
    )

  def _prefill_work(
    self, request_id: int, tokens: int, start: int, table: np.ndarray
  ) -> protocol.PrefillWork:
    ids = self._rng.integers(0, self._model.vocab_size, tokens).astype(np.int32)
    return protocol.PrefillWork(
      request_id=request_id, token_ids=ids, start=start, page_table=table, samples=True
    )

  def _tables(self, rows: int, tokens: int) -> Sequence[np.ndarray]:
    pages = self._pages(tokens)
    return [self._slots[row * pages : (row + 1) * pages] for row in range(rows)]

  def _layer_weights(self) -> int:
    shapes = build.layer_shapes(self._model).values()
    return self._model.num_layers * sum(math.prod(shape) for _, shape in shapes)

  def _weight_bytes(self) -> int:
    """What a decode step reads: all layers and the head, not the embedding."""
    head = self._model.vocab_size * self._model.hidden_size
    return (self._layer_weights() + head) * jnp.dtype(self._model.dtype).itemsize

  def _flops(self, tokens: int) -> float:
    """Of a cold prompt: its products with weights, and causal attention."""
    model = self._model
    scores = 2 * model.num_layers * model.num_heads * model.head_dim * tokens**2
    return 2.0 * self._layer_weights() * tokens + scores


if __name__ == "__main__":
  FLAGS.run(main)
