"""What a step as in serving takes: decodes behind long contexts, prefills of questions.

  XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false" \\
    python -m experiments.step_bench --attentions=hopper,cudnn

Drives the executor alone, no serving loop. A row: so many decodes, of which `rows_a_context` have
the pages of a context in common, and so many prompts of a question behind contexts of their own.
`step_ms` is from launch to event, the median; `launch_ms` what the host needs for the launch;
`busy_ms` and `attention_ms` how long any kernel, and any of attention, ran in a step under JAX's
profiler (null without a GPU). Without a GPU flags that are not given have the values of a tiny run,
which shows that all of it runs.
"""

import dataclasses
import itertools
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np

from experiments import (
  executor_flags,
  flags,
  model_bench,
  run_folder,
  trace_events,
  trace_profile,
)
from strata_jax import config as config_lib
from strata_jax import validation
from strata_jax.executors import buckets as buckets_lib
from strata_jax.executors import choices, jax_executor, protocol
from strata_jax.models import random

_PROFILED_STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBenchConfig:
  """What is run."""

  model: str = "llama31_8b"  # preset, with random weights
  page_size: int = 32  # tokens of a page
  context_tokens: int = 20_000  # tokens before the decoded one, or the question
  question_tokens: int = 40  # tokens of a prompt that are computed
  decodes: tuple[int, ...] = (0, 7, 12, 24)  # sequences that decode
  rows_a_context: tuple[int, ...] = (1, 2, 4)  # decodes that have a context in common
  prompts: tuple[int, ...] = (0, 1, 2)  # prompts of a step
  attentions: tuple[str, ...] = ("auto",)  # of reference, xla, cudnn, hopper; auto: the fastest
  running_requests: int = 28  # decodes of the largest batch that is compiled
  piece_tokens: int = 256  # tokens of the largest piece that a prefill is cut into
  prefill_rows: int = 4  # pieces of different prefills that are computed together, at most
  row_factor: int = 2  # factor between the numbers of rows that batches are padded to
  layers_per_program: tuple[int, ...] = (8,)  # layers of program 1, 2, ...; the last: of all others
  joint_tokens: tuple[int, ...] = (0, 256)  # padded tokens of prefills in one pass with decodes
  rounds: int = 9  # steps, of which the median is taken
  seed: int = 0  # of weights, prompts and slots

  def __post_init__(self) -> None:
    model_bench.check(self)
    if max(self.decodes) > self.running_requests:
      validation.fail(self, "decodes", f"at most running_requests {self.running_requests}",
                      self.decodes)  # fmt: skip


FLAGS = flags.FlagSet("Measures steps of the JAX executor as they are in serving.")
FLAGS.add(StepBenchConfig)
FLAGS.add_flag("out", str, "runs/step_bench", "folder that the run writes")

_TINY = StepBenchConfig(
  model="tiny", page_size=4, context_tokens=64, question_tokens=5, decodes=(0, 2),
  rows_a_context=(1, 2), prompts=(0, 1), running_requests=2, piece_tokens=16,
  layers_per_program=(1,), joint_tokens=(0, 32), rounds=2,
)  # fmt: skip


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  config, out = model_bench.begin(args, "bench", StepBenchConfig, _TINY)
  model = config_lib.MODELS[config.model]
  with flags.usage_errors():
    for attention in config.attentions:
      choices.attention_on(jax.devices()[0], attention, model, model.page_layout(config.page_size))
  params = jax.block_until_ready(random.random_params(model, config.seed))
  rows = []
  for attention, joint in itertools.product(config.attentions, config.joint_tokens):
    bench = StepBench(config, params, attention, joint)
    for decodes in config.decodes:
      for shared in config.rows_a_context if decodes else (1,):
        for prompts in config.prompts:
          # Steps of one kind are the same with and without joint passes.
          if (decodes and prompts) or ((decodes or prompts) and joint == config.joint_tokens[0]):
            rows.append(bench.measure(decodes, shared, prompts))
            run_folder.say(str(rows[-1]))
    del bench  # its pools
  summary = {"device_kind": run_folder.device_kind(), "model": config.model, "rows": rows}
  run_folder.finish(out, summary)


class StepBench:
  """An executor, and the steps that are timed."""

  def __init__(self, config: StepBenchConfig, params: Any, attention: str, joint: int) -> None:
    """Compiles all shapes."""
    self._config, self._attention, self._joint = config, attention, joint
    self._model = config_lib.MODELS[config.model]
    layout = self._model.page_layout(config.page_size)
    self._context_pages = -(-config.context_tokens // config.page_size)
    self._own_pages = -(-config.question_tokens // config.page_size) + 1
    contexts = max(config.decodes) + max(config.prompts)
    device_pages = contexts * (self._context_pages + self._own_pages)
    on_gpu = jax.default_backend() == "gpu"
    self._executor = jax_executor.JaxExecutor(
      self._model,
      params,
      layout,
      device_pages=device_pages,
      host_pages=0,
      buckets=buckets_lib.make_buckets(
        layout,
        config_lib.ServingConfig(running_requests=config.running_requests),
        device_pages=device_pages,
        context_tokens=config.page_size * (self._context_pages + self._own_pages),
        piece_tokens=config.piece_tokens,
        prefill_rows=config.prefill_rows,
        row_factor=config.row_factor,
        least_decodes=executor_flags.LEAST_DECODES_GPU if on_gpu else 1,
        joint_tokens=joint,
      ),
      attention=attention,
      layers_per_program=config.layers_per_program,
    )
    self._executor.warmup()
    self._rng = np.random.default_rng(config.seed)
    self._pages = self._rng.permutation(device_pages).astype(np.int32)
    for request_id in range(contexts):
      self._executor.register(request_id, protocol.SamplingParams(), None)
    self._steps = 0

  def measure(self, decodes: int, rows_a_context: int, prompts: int) -> dict[str, Any]:
    """The row of such a step."""
    work = self._work(decodes, rows_a_context, prompts)
    timed = [self._step(work) for _ in range(self._config.rounds + 1)][1:]
    busy_ms, attention_ms = self._profile(work)
    return {
      "attention": self._attention,
      "joint_tokens": self._joint,
      "decodes": decodes,
      "rows_a_context": rows_a_context,
      "prompts": prompts,
      "step_ms": 1e3 * statistics.median(step_s for step_s, _ in timed),
      "launch_ms": 1e3 * statistics.median(launch_s for _, launch_s in timed),
      "busy_ms": busy_ms,
      "attention_ms": attention_ms,
    }

  def _work(self, decodes: int, rows_a_context: int, prompts: int) -> dict[str, Any]:
    """Decodes of one context stand as far apart in the batch as can be."""
    contexts = -(-decodes // rows_a_context)
    tables = [self._table(row, row % contexts) for row in range(decodes)]
    behind = self._config.context_tokens
    prefills = []
    for row in range(decodes, decodes + prompts):
      ids = self._rng.integers(0, self._model.vocab_size, self._config.question_tokens)
      prefills.append(
        protocol.PrefillWork(
          request_id=row, token_ids=ids.astype(np.int32), start=behind,
          page_table=self._table(row, row), samples=True,
        )
      )  # fmt: skip
    return {
      "prefills": tuple(prefills),
      "decodes": tuple(
        protocol.DecodeWork(request_id=row, token_id=1, position=behind, page_table=table)
        for row, table in enumerate(tables)
      ),
    }

  def _table(self, row: int, context: int) -> np.ndarray:
    """int32 [N]: the whole pages of a context, then pages of the row's own."""
    whole = self._config.context_tokens // self._config.page_size
    own = self._context_pages + self._own_pages - whole
    length = whole + own
    pages = self._pages
    return np.concatenate(
      [pages[context * length :][:whole], pages[row * length + whole : (row + 1) * length]]
    )

  def _step(self, work: dict[str, Any]) -> tuple[float, float]:
    """Seconds of a step, and of its launch."""
    started_s, begun_s = time.perf_counter(), self._executor.now_s()
    self._executor.launch(protocol.StepWork(step_id=self._steps, **work))
    launch_s = time.perf_counter() - started_s
    self._steps += 1
    (done,) = self._executor.wait(None)
    return done.at_s - begun_s, launch_s

  def _profile(self, work: dict[str, Any]) -> tuple[float | None, float | None]:
    """Milliseconds a step in which any kernel ran, and any of attention."""
    if jax.default_backend() != "gpu":
      return None, None
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
      with jax.profiler.trace(folder, profiler_options=options):
        for _ in range(_PROFILED_STEPS):
          self._step(work)
      (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
      device = trace_profile.device_events(trace_profile.read(path))
    attention = [r for r in device if trace_profile.lane_of(r) == trace_events.ATTENTION]
    busy_ms, attention_ms = (
      trace_events.total_us(trace_events.union((r.start_us, r.end_us) for r in raws)) / 1e3
      for raws in (device, attention)
    )
    return busy_ms / _PROFILED_STEPS, attention_ms / _PROFILED_STEPS


if __name__ == "__main__":
  FLAGS.run(main)
