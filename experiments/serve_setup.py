"""From the flags of the serve experiment to a model, configs, a policy and requests.

Everything a user can get wrong is found here, before anything is compiled, and answered with one
line.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np

from experiments import (
  executor_flags,
  flags,
  run_folder,
  storage_flags,
  synthetic_flags,
  workload_flags,
)
from experiments.executor_flags import ExecutorConfig, IoNames
from experiments.storage_flags import StorageChoice
from experiments.synthetic_flags import ShapeConfig
from strata_jax import policy_loading, systems
from strata_jax.config import CacheConfig, ModelConfig, ServingConfig
from strata_jax.executors.jax_executor import JaxExecutor
from strata_jax.executors.protocol import SamplingParams
from strata_jax.models import loader
from strata_jax.models.llama import Params
from strata_jax.models.revision import weights_revision
from strata_jax.models.tokenizer import Tokenizer
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import Policy
from strata_jax.tiers import page_store
from strata_jax.tiers.layout import PageLayout
from strata_jax.workloads import folding, prompts_file, stdlib_qa, synthetic
from strata_jax.workloads.request import Request
from strata_jax.workloads.stdlib_qa import StdlibQaConfig
from strata_jax.workloads.workload import Workload

WORKLOADS = ("stdlib_qa", *synthetic.GENERATORS)
INITIAL_CACHES = ("cold", "host_warm")

_LIMITS = (  # flag, minimum, maximum
  ("max_new_tokens", 1, math.inf),
  ("temperature", 0, 1e6),
  ("ttft_visits", 0, math.inf),
  ("seed", 0, (1 << 31) - 1),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """What a run needs."""

  model: ModelConfig
  params: Params
  tokenizer: Tokenizer | None
  cache: CacheConfig
  serving: ServingConfig
  scheduler: SchedulerConfig
  policy: Policy
  policy_name: str
  page_layout: PageLayout
  io: IoNames
  executor: ExecutorConfig
  initial_cache: str
  fingerprint: str
  storage: StorageChoice | None
  workload: Workload

  @property
  def configs(self) -> dict[str, Any]:
    """For `config.json`."""
    names = ("model", "cache", "serving", "scheduler", "policy_name", "page_layout", "io")
    names += ("executor", "initial_cache", "fingerprint", "storage")
    return {name: getattr(self, name) for name in names}


def set_up(args: flags.Args) -> Setup:
  """Makes all of it.

  Raises:
    UsageError: flags, weights or requests that cannot be; one line.
  """
  cache, scheduler, policy_name, io = _system(args)
  cache, storage = storage_flags.choose(args, cache)
  if args.prefetch is not None:
    scheduler = dataclasses.replace(scheduler, prefetch=args.prefetch)
  serving = args.config(ServingConfig)
  executor = args.config(ExecutorConfig)
  qa = args.config(StdlibQaConfig)
  shape = args.config(ShapeConfig)
  if args.weights is None:
    raise flags.UsageError(
      "--weights: expected a folder, a .gguf file, smollm2, or random with --model; got nothing"
    )
  if args.workload not in WORKLOADS:
    raise flags.UsageError(
      f"--workload: expected one of {', '.join(WORKLOADS)}, got {args.workload!r}"
    )
  if args.initial_cache not in INITIAL_CACHES:
    raise flags.UsageError(
      f"--initial_cache: expected one of {', '.join(INITIAL_CACHES)}, got {args.initial_cache!r}"
    )
  for name, minimum, maximum in _LIMITS:
    if not minimum <= getattr(args, name) <= maximum:
      expected = f"{minimum} to {maximum:,}" if maximum < math.inf else f"at least {minimum}"
      raise flags.UsageError(f"--{name}: expected {expected}, got {getattr(args, name)}")
  if serving.step_tokens < cache.page_size:
    raise flags.UsageError(
      f"--step_tokens: expected at least a page of {cache.page_size:,} tokens, "
      f"got {serving.step_tokens:,}"
    )
  with flags.usage_errors():
    policy = policy_loading.load_policy(policy_name, scheduler)
    run_folder.say(f"reads the weights {args.weights}")
    model, params, tokenizer = loader.load_model(args.weights, args.model, seed=args.seed)
    page_layout = model.page_layout(cache.page_size)
    workload = _workload(args, qa, shape, model, tokenizer)
    workload = workload_flags.set_arrivals(workload, args)
  _check_warm(args, workload, cache)
  check_sizes(workload.requests, model, cache)
  return Setup(
    model=model,
    params=params,
    tokenizer=tokenizer,
    cache=cache,
    serving=serving,
    scheduler=scheduler,
    policy=policy,
    policy_name=policy_name,
    page_layout=page_layout,
    io=io,
    executor=executor,
    initial_cache=args.initial_cache,
    fingerprint=fingerprint(args, model, params, page_layout, storage),
    storage=storage,
    workload=workload,
  )


def make_executor(setup: Setup, store: page_store.PageStore | None = None) -> JaxExecutor:
  """The pools and programs for a setup. Raises UsageError, for example without memory for it."""
  longest = max(len(r.prompt_ids) + r.max_new_tokens for r in setup.workload.requests)
  with flags.usage_errors(), enough_memory(setup.cache):
    return executor_flags.make(
      setup.model,
      setup.params,
      setup.cache,
      setup.serving,
      setup.executor,
      setup.io,
      context_tokens=longest,
      store=store,
    )


def open_store(setup: Setup) -> page_store.PageStore | None:
  """The store of the storage tier, if there is one. Raises UsageError."""
  if setup.storage is None:
    return None
  return setup.storage.open(page_bytes=setup.page_layout.page_bytes, fingerprint=setup.fingerprint)


def fingerprint(
  args: flags.Args,
  model: ModelConfig,
  params: Params,
  page_layout: PageLayout,
  storage: StorageChoice | None,
) -> str:
  """Names all that KV bytes depend on besides the tokens.

  The weights count by their values where pages outlive the process, else by their name.
  """
  revision = f"{args.weights}:{args.seed}"
  if storage is not None and args.weights != loader.RANDOM:
    revision = weights_revision(params)
  text = repr((revision, dataclasses.asdict(model), dataclasses.asdict(page_layout)))
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def warm_up(executor: JaxExecutor) -> None:
  """Compiles all programs, with a progress bar."""
  bars: list[run_folder.Progress] = []

  def progress(done: int, total: int, name: str) -> None:
    if not bars:
      bars.append(run_folder.Progress(total, "compile"))
    bars[0].update(done, name)

  executor.warmup(progress)
  for bar in bars:
    bar.close()


def share_the_interpreter() -> None:
  """Lets Python's threads take turns every 0.1 ms, not 5.

  The serving loop would wait that long for threads that submit copies, between any two steps.
  """
  sys.setswitchinterval(1e-4)


def visits(requests: Sequence[Request], count: int) -> list[Request]:
  """Up to `count` requests about different documents, the last given first, one token each.

  Two requests are about the same document if they share at least half of the shorter prompt.
  """
  chosen: list[Request] = []
  for request in reversed(requests):
    if len(chosen) == count:
      break
    if not any(_same_document(request, other) for other in chosen):
      chosen.append(dataclasses.replace(request, max_new_tokens=1, arrival_s=None))
  return chosen


def _same_document(a: Request, b: Request) -> bool:
  shorter = min(len(a.prompt_ids), len(b.prompt_ids))
  half = -(-shorter // 2)
  return a.salt == b.salt and np.array_equal(a.prompt_ids[:half], b.prompt_ids[:half])


@contextlib.contextmanager
def enough_memory(cache: CacheConfig) -> Generator[None]:
  """Pools that no memory can hold are a UsageError."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    reason = str(error).splitlines()[0]
    raise flags.UsageError(
      f"--device_tokens={cache.device_tokens} with --host_tokens={cache.host_tokens}: expected "
      f"pools that fit into memory, got {reason}"
    ) from error


def _system(args: flags.Args) -> tuple[CacheConfig, SchedulerConfig, str, IoNames]:
  """Cache, scheduler, policy name and ways to move pages, as preset and flags say."""
  if args.system is None:
    io = executor_flags.io_of(None)
    return args.config(CacheConfig), SchedulerConfig(), args.policy or "strata", io
  with flags.usage_errors():
    system = systems.system(args.system)
  base = CacheConfig(
    page_size=system.page_size,
    device_tokens=system.page_size,  # until the flags say
    write_policy=system.write_policy,
    selective_threshold=system.selective_threshold,
    enabled=system.prefix_cache,
  )
  # Flags give the sizes of tiers; whether there is a host tier is the system's own.
  host_tokens = args.host_tokens if system.host else 0
  cache = args.config(
    CacheConfig, base=base, device_tokens=args.device_tokens, host_tokens=host_tokens
  )
  io = executor_flags.io_of(system)
  return cache, system.scheduler_config, args.policy or system.policy, io


def _check_warm(args: flags.Args, workload: Workload, cache: CacheConfig) -> None:
  if args.initial_cache == "cold":
    return
  if not workload.contexts:
    raise flags.UsageError(
      f"--initial_cache={args.initial_cache}: expected a workload with shared contexts, "
      f"got {workload.name}"
    )
  if not (cache.enabled and cache.host_pages):
    raise flags.UsageError(
      f"--initial_cache={args.initial_cache}: expected a cache with a host tier, got none"
    )


def _workload(
  args: flags.Args,
  qa: StdlibQaConfig,
  shape: ShapeConfig,
  model: ModelConfig,
  tokenizer: Tokenizer | None,
) -> Workload:
  if args.prompts is None and args.workload in synthetic.GENERATORS:
    return _synthetic(args, shape, model)
  options: dict[str, Any] = {
    "max_new_tokens": args.max_new_tokens,
    "temperature": args.temperature,
    "seed": args.seed,
    "stop_token_ids": model.eos_token_ids,
  }
  if args.prompts is not None:
    return prompts_file.read_prompts(
      args.prompts,
      encode=None if tokenizer is None else tokenizer.encode,
      vocab_size=model.vocab_size,
      **options,
    )
  encode: Callable[[str], np.ndarray] = functools.partial(_bytes_as_ids, model.vocab_size)
  if tokenizer is not None:
    encode = tokenizer.encode
  chat = tokenizer is not None and tokenizer.has_chat_template
  return stdlib_qa.stdlib_qa(qa, encode=encode, chat=chat, **options)


def _synthetic(args: flags.Args, shape: ShapeConfig, model: ModelConfig) -> Workload:
  """Exact output lengths, the model's own tokens."""
  found = folding.fold(synthetic_flags.generate(args.workload, shape, args.seed), model.vocab_size)
  sampled = [
    dataclasses.replace(
      request,
      sampling=SamplingParams(temperature=args.temperature, seed=args.seed + request.request_id),
    )
    for request in found.requests[: args.limit]
  ]
  return found.with_requests(sampled)


def _bytes_as_ids(vocab_size: int, text: str) -> np.ndarray:
  """Stands in for a tokenizer that random weights do not have; int32 [bytes]."""
  return np.frombuffer(text.encode(), np.uint8).astype(np.int32) % vocab_size


def check_sizes(requests: Sequence[Request], model: ModelConfig, cache: CacheConfig) -> None:
  """Refuses what can never be served."""
  for r in requests:
    prompt, total = len(r.prompt_ids), len(r.prompt_ids) + r.max_new_tokens
    needs = f"request {r.request_id} has a prompt of {prompt:,} and up to {r.max_new_tokens:,} new"
    if total > model.context_tokens:
      raise flags.UsageError(
        f"{needs} tokens: expected at most {model.context_tokens:,} together, "
        f"the context of {model.name}"
      )
    pages = -(-(total - 1) // cache.page_size)  # the last output token has no KV
    if pages > cache.device_pages:
      raise flags.UsageError(
        f"{needs} tokens: the device pool is too small, "
        f"expected --device_tokens of at least {pages * cache.page_size}, got {cache.device_tokens}"
      )
