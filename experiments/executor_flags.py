"""How the real executor is made: ways to move pages, shapes that are compiled."""

import dataclasses

import jax

from strata_jax import attention, validation
from strata_jax.config import CacheConfig, ModelConfig, ServingConfig
from strata_jax.executors import buckets
from strata_jax.executors.jax_executor import JaxExecutor
from strata_jax.models.llama import Params
from strata_jax.systems import SystemConfig
from strata_jax.tiers import page_store

# The products of a single row are of a vector: such a step takes 1.8 times as long as with 8 rows.
LEAST_DECODES_GPU = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
  """Shapes of the compiled programs."""

  piece_tokens: int = 512  # tokens of the largest piece that a prefill is cut into
  prefill_rows: int = 1  # pieces of different prefills that are computed together, at most
  layers_per_program: tuple[int, ...] = (1,)  # layers of program 1, 2, ...; the last: of all others
  attention: str = "auto"  # or "reference", "xla", "cudnn", "hopper"; auto: the fastest that can be
  row_factor: int = 4  # factor between the numbers of rows that batches are padded to
  joint_tokens: int = 0  # padded tokens of a prefill batch that decodes share a pass with, at most

  def __post_init__(self) -> None:
    validation.check_choice(self, "attention", ("auto", *attention.IMPLEMENTATIONS))
    validation.check_ints(self, "layers_per_program", minimum=1)
    for field in dataclasses.fields(self):
      if field.type is not int:
        continue
      minimum = {"row_factor": 2, "joint_tokens": 0}.get(field.name, 1)
      validation.check_int(self, field.name, minimum=minimum)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IoNames:
  """Back ends of a run by direction, and how loads overlap compute."""

  load: str = "auto"
  store: str = "auto"
  overlap: str = "auto"


def io_of(system: SystemConfig | None, *, on_cpu: bool | None = None) -> IoNames:
  """What a system means for this machine's executor; None: what is fastest here.

  On a GPU `memcpy_batch` is `copy_engine`: both are one batch of copies of fragments a layer, gated
  for loads, beside the compute for backups. A CPU has the reference back end, and `device_put`.
  """
  on_cpu = jax.default_backend() == "cpu" if on_cpu is None else on_cpu
  if system is None:
    return IoNames(load="reference", store="reference") if on_cpu else IoNames()
  if not system.host:  # nothing is moved
    return io_of(None, on_cpu=on_cpu)
  overlap = "layer" if system.overlap == "layer" else "whole"
  load, store = (_backend(n, on_cpu) for n in (system.load_backend, system.store_backend))
  return IoNames(load=load, store=store, overlap=overlap)


def _backend(name: str, on_cpu: bool) -> str:
  if on_cpu:
    return "device_put" if name == "device_put" else "reference"
  return "copy_engine" if name == "memcpy_batch" else name


def make(
  model: ModelConfig,
  params: Params,
  cache: CacheConfig,
  serving: ServingConfig,
  config: ExecutorConfig,
  io: IoNames,
  *,
  context_tokens: int,
  store: page_store.PageStore | None = None,
  pools: tuple | None = None,
) -> JaxExecutor:
  """An executor whose pools and programs fit a cache.

  Args:
    model: whose weights `params` are.
    params: the weights.
    cache: gives the sizes of pages and pools.
    serving: budgets, which bound the shapes.
    config: of the shapes.
    io: ways to move pages.
    context_tokens: the longest prompt with its output.
    store: of the storage tier, if there is one.
    pools: that another executor gave up.

  Raises:
    ValueError: what the executor refuses.
  """
  page_layout = model.page_layout(cache.page_size)
  return JaxExecutor(
    model,
    params,
    page_layout,
    device_pages=cache.device_pages,
    host_pages=cache.host_pages,
    buckets=buckets.make_buckets(
      page_layout,
      serving,
      device_pages=cache.device_pages,
      context_tokens=context_tokens,
      piece_tokens=config.piece_tokens,
      prefill_rows=config.prefill_rows,
      row_factor=config.row_factor,
      least_decodes=1 if jax.default_backend() == "cpu" else LEAST_DECODES_GPU,
      joint_tokens=config.joint_tokens,
    ),
    io=io.load,
    store_io=io.store,
    overlap=io.overlap,
    layers_per_program=config.layers_per_program,
    attention=config.attention,
    store=store,
    pools=pools,
  )
