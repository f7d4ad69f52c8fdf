"""The scenarios of `timeline`: steps of the JAX executor, measured first and then traced."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from experiments import model_bench, trace_profile
from strata_jax import config as config_lib
from strata_jax import serving_loop, validation
from strata_jax.cache_controller import CacheController
from strata_jax.executors import buckets as buckets_lib
from strata_jax.executors import jax_executor, protocol
from strata_jax.metrics import ServingResult
from strata_jax.models import llama
from strata_jax.scheduler import policies
from strata_jax.scheduler.views import SchedulerView, StepPlan
from strata_jax.workloads.request import Request

OTHERS = ("bubble", "backup", "serving")
LOADS = ("kernel/layer", "kernel/whole", "copy_engine/layer", "memcpy_async/layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimelineConfig:
  """What is traced."""

  scenarios: tuple[str, ...] = (*LOADS, *OTHERS)  # I/O back end/overlap, bubble, backup, serving
  model: str = "llama31_8b"  # preset, with random weights
  page_size: int = 16  # tokens of a page
  steps: int = 3  # steps of a scenario (serving takes what it takes)
  copied_steps: int = 2  # steps where the driver copies: each copy is an event of the profile
  prefill_tokens: int = 512  # tokens computed while a load or a backup runs
  load_tokens: int = 4096  # tokens loaded beside them, or backed up
  decode_batch: int = 8  # sequences that decode beside a parked load
  decode_context: int = 1024  # tokens of context of each
  decode_steps: int = 2  # decode steps in one launch
  documents: int = 3  # serving: one question about each; the device holds all but one
  document_tokens: int = 4096  # serving: tokens of a document
  question_tokens: int = 20  # serving: tokens of a question
  output_tokens: int = 6  # serving: tokens of an answer
  io: str = "auto"  # I/O back end of bubble, backup and serving
  layers_per_program: tuple[int, ...] = (1,)  # layers of program 1, 2, ...; the last: of all others
  rounds: int = 5  # measurements without a profiler, of which the median is told
  seed: int = 0  # of weights, prompts and slots

  def __post_init__(self) -> None:
    model_bench.check(self)
    validation.check_int(self, "documents", minimum=2)
    for name in self.scenarios:
      if name not in OTHERS and name.count("/") != 1:
        expected = f"names as in {', '.join((*LOADS, *OTHERS))}"
        validation.fail(self, "scenarios", expected, name)


# Sizes with which all scenarios share their programs, which take longer to compile than to run.
TINY = TimelineConfig(
  scenarios=("auto/layer", "auto/whole", *OTHERS), model="tiny", page_size=4, prefill_tokens=32,
  load_tokens=64, decode_batch=2, decode_context=62, document_tokens=64, question_tokens=26,
  output_tokens=6, rounds=2,
)  # fmt: skip


class Scenario(Protocol):
  """Made ready and measured before the profiler starts, then run under it."""

  name: str

  def prepare(self) -> None: ...

  def record(self) -> None:
    """Warms up once more, for what is different under a profiler, then runs annotated."""
    ...


class AnnotatedExecutor(jax_executor.JaxExecutor):
  """The executor with its launches and waits marked in a profile, and launches timed."""

  def __init__(self, *args: Any, **kwargs: Any) -> None:
    super().__init__(*args, **kwargs)
    self._launches_s: list[float] = []

  def launch(self, work: protocol.StepWork) -> None:
    """See `JaxExecutor.launch`."""
    started_s = time.perf_counter()
    with jax.profiler.TraceAnnotation(
      trace_profile.LAUNCH, step_id=work.step_id, prefills=len(work.prefills),
      prefill_tokens=sum(len(prefill.token_ids) for prefill in work.prefills),
      decodes=len(work.decodes), decode_steps=work.decode_steps,
      load_tokens=sum(load.tokens for load in work.loads),
      parked_loads=len(work.parked_loads),
      backup_tokens=sum(backup.tokens for backup in work.backups),
    ):  # fmt: skip
      super().launch(work)
    if work.computes:
      self._launches_s.append(time.perf_counter() - started_s)

  def wait(self, until_s: float | None) -> list[protocol.Event]:
    """See `JaxExecutor.wait`."""
    with jax.profiler.TraceAnnotation(trace_profile.WAIT):
      return super().wait(until_s)

  def take_launches_s(self) -> list[float]:
    """Seconds of the launches with compute since the last call."""
    taken, self._launches_s = self._launches_s, []
    return taken


def make(config: TimelineConfig, params: llama.Params) -> list[Scenario]:
  """The scenarios of a config. Raises ValueError where a back end or an overlap cannot be here."""
  rigs: dict[str, Rig] = {}
  found: list[Scenario] = []
  for name in config.scenarios:
    if name == "serving":
      found.append(Serving(config, params))
      continue
    loads = f"{config.io}/auto" if name in OTHERS else name
    if loads not in rigs:
      rigs[loads] = Rig(config, params, loads)
    found.append(Steps(config, rigs[loads], name))
  return found


class Rig:
  """An executor and the work for its steps."""

  def __init__(self, config: TimelineConfig, params: llama.Params, loads: str) -> None:
    self.io, overlap = loads.split("/")
    self._config = config
    self._model = config_lib.MODELS[config.model]
    self.layout = self._model.page_layout(config.page_size)
    self._pages = lambda tokens: -(-tokens // config.page_size)
    decode_pages = self._pages(config.decode_context + config.decode_steps)
    context_pages = self._pages(config.load_tokens + config.prefill_tokens)
    device_pages = max(context_pages, config.decode_batch * decode_pages)
    device_pages += self._pages(config.load_tokens)  # of a load that nobody reads
    self.executor = AnnotatedExecutor(
      self._model,
      params,
      self.layout,
      device_pages=device_pages,
      host_pages=self._pages(config.load_tokens),
      buckets=buckets_lib.Buckets(
        chunk_tokens=(config.prefill_tokens,),
        decode_requests=(config.decode_batch,),
        transfer_pages=(self._pages(config.load_tokens),),
        table_pages=max(context_pages, decode_pages),
      ),
      io=self.io,
      overlap=overlap,
      layers_per_program=config.layers_per_program,
    )
    self._rng = np.random.default_rng(config.seed)
    self._slots = self._rng.permutation(device_pages).astype(np.int32)
    self._spare = self._slots[device_pages - self._pages(config.load_tokens) :]
    self._step_id = 0
    for request_id in range(config.decode_batch):
      self.executor.register(request_id, protocol.SamplingParams(), None)

  def behind_load(self) -> dict[str, Any]:
    """A prefill behind a context that is loaded."""
    load = self._load(self._slots)
    return {"loads": (load,), "prefills": (self._prefill(waits_for=(1,)),)}

  def bubble(self) -> dict[str, Any]:
    """Decode steps of a batch while a load runs for a request that is parked."""
    pages = self._pages(self._config.decode_context + self._config.decode_steps)
    decodes = tuple(
      protocol.DecodeWork(
        request_id=row, token_id=1, position=self._config.decode_context,
        page_table=self._slots[row * pages : (row + 1) * pages],
      )
      for row in range(self._config.decode_batch)
    )  # fmt: skip
    return {
      "loads": (self._load(self._spare),), "parked_loads": (1,), "decodes": decodes,
      "decode_steps": self._config.decode_steps,
    }  # fmt: skip

  def backup(self) -> dict[str, Any]:
    """A backup of pages of an earlier step beside a prefill."""
    backup = protocol.BackupWork(
      transfer_id=1, node_ids=(), device_slots=self._spare, host_slots=self._host_slots(),
      tokens=self._config.load_tokens,
    )  # fmt: skip
    return {"backups": (backup,), "prefills": (self._prefill(),)}

  def run(self, parts: dict[str, Any]) -> float:
    """One step from its launch to its last event; seconds."""
    work = protocol.StepWork(step_id=self._step_id, **parts)
    self._step_id += 1
    started_s = time.perf_counter()
    self.executor.launch(work)
    events = 0
    while events < len(work.loads) + len(work.backups) + work.computes:
      events += len(self.executor.wait(None))
    return time.perf_counter() - started_s

  def _load(self, device_slots: np.ndarray) -> protocol.LoadWork:
    host_slots = self._host_slots()
    return protocol.LoadWork(
      transfer_id=1, request_id=0, node_ids=(), host_slots=host_slots,
      device_slots=device_slots[: len(host_slots)], tokens=self._config.load_tokens,
    )  # fmt: skip

  def _host_slots(self) -> np.ndarray:
    pages = self._pages(self._config.load_tokens)
    return self._rng.permutation(pages).astype(np.int32)

  def _prefill(self, waits_for: tuple[int, ...] = ()) -> protocol.PrefillWork:
    tokens = self._config.prefill_tokens
    ids = self._rng.integers(0, self._model.vocab_size, tokens).astype(np.int32)
    start = self._config.load_tokens
    return protocol.PrefillWork(
      request_id=0, token_ids=ids, start=start, samples=True, waits_for=waits_for,
      page_table=self._slots[: self._pages(start + tokens)],
    )  # fmt: skip


class Steps:
  """Some equal steps, each waited for."""

  def __init__(self, config: TimelineConfig, rig: Rig, name: str) -> None:
    self.name = name
    self._config = config
    self._rig = rig
    self._make = {"bubble": rig.bubble, "backup": rig.backup}.get(name, rig.behind_load)
    self._told: dict[str, Any] = {}

  def prepare(self) -> None:
    """Compiles, then measures without a profiler."""
    for _ in range(2):  # outputs that come back as inputs may compile once more
      self._rig.run(self._make())
    self._rig.executor.take_launches_s()
    steps_s = [self._rig.run(self._make()) for _ in range(self._config.rounds)]
    self._told = _told(self._rig.layout.fragment_bytes, steps_s, self._rig.executor)

  def record(self) -> None:
    """See `Scenario`. Without a warm-up where the driver copies, for the profile's size."""
    copied = self._rig.io in ("copy_engine", "memcpy_async")
    steps = min(self._config.steps, self._config.copied_steps) if copied else self._config.steps
    if not copied:
      self._rig.run(self._make())
    with _scenario(self.name, self._told):
      for _ in range(steps):
        self._rig.run(self._make())


class Serving:
  """The serving loop: questions about documents, in turn, of which the device holds all but one.

  The first round computes the documents, which are backed up; in later ones each document has been
  evicted from the device when its turn comes and is loaded from the host.
  """

  def __init__(self, config: TimelineConfig, params: llama.Params) -> None:
    self.name = "serving"
    self._config = config
    self._model = config_lib.MODELS[config.model]
    layout = self._model.page_layout(config.page_size)
    self._fragment_bytes = layout.fragment_bytes
    longest = config.document_tokens + config.question_tokens + config.output_tokens
    longest += -longest % config.page_size
    cache = config_lib.CacheConfig(
      page_size=config.page_size,
      device_tokens=(config.documents - 1) * longest,
      host_tokens=4 * config.documents * longest,
    )
    self._serving = config_lib.ServingConfig(
      requests_in_flight=2,
      running_requests=2,
      step_tokens=max(config.prefill_tokens, config.page_size),
    )
    self._executor = AnnotatedExecutor(
      self._model,
      params,
      layout,
      device_pages=cache.device_pages,
      host_pages=cache.host_pages,
      buckets=buckets_lib.make_buckets(
        layout, self._serving, device_pages=cache.device_pages, context_tokens=longest
      ),
      io=config.io,
      layers_per_program=config.layers_per_program,
    )
    self._controller = CacheController(cache, self._serving, fingerprint=config.model)
    self._policy = policies.make_policy("strata")
    self._rng = np.random.default_rng(config.seed)
    self._documents = [self._tokens(config.document_tokens) for _ in range(config.documents)]
    self._told: dict[str, Any] = {}

  def prepare(self) -> None:
    """Compiles, computes the documents, and serves a round that is measured."""
    self._executor.warmup()
    self._serve()
    self._executor.take_launches_s()
    result = self._serve()
    steps_s = [step.ended_s - step.started_s for step in result.steps if _computes(step)]
    self._told = _told(self._fragment_bytes, steps_s, self._executor)

  def record(self) -> None:
    """See `Scenario`."""
    self._serve()
    with _scenario(self.name, self._told):
      self._serve()

  def _serve(self) -> ServingResult:
    requests = [
      Request(
        request_id=request_id,
        prompt_ids=np.concatenate([document, self._tokens(self._config.question_tokens)]),
        max_new_tokens=self._config.output_tokens,
      )
      for request_id, document in enumerate(self._documents)
    ]
    return serving_loop.serve(
      requests, controller=self._controller, policy=self._plan, executor=self._executor,
      serving=self._serving,
    )  # fmt: skip

  def _plan(self, view: SchedulerView) -> StepPlan:
    with jax.profiler.TraceAnnotation(trace_profile.PLAN):
      return self._policy(view)

  def _tokens(self, count: int) -> np.ndarray:
    return self._rng.integers(0, self._model.vocab_size, count).astype(np.int32)


def _computes(step: Any) -> bool:
  return bool(step.prefill_requests or step.decode_requests)


def _told(
  fragment_bytes: int, steps_s: Sequence[float], executor: AnnotatedExecutor
) -> dict[str, Any]:
  """What a scenario's annotation tells beside its name: numbers alone, which a profile keeps."""
  launches_s = executor.take_launches_s()
  return {
    "copy_bytes": fragment_bytes // 2,  # K or V: the smallest copy of a back end
    "unprofiled_step_ms": statistics.median(steps_s) * 1e3,
    "unprofiled_launch_ms": statistics.median(launches_s) * 1e3,
  }


def _scenario(name: str, told: dict[str, Any]) -> jax.profiler.TraceAnnotation:
  annotation: Callable[..., jax.profiler.TraceAnnotation] = jax.profiler.TraceAnnotation
  return annotation(trace_profile.SCENARIO, scenario=name, **told)
