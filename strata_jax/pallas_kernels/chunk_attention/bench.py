"""Times of chunk attention, beside those of another function.

`print_sweep` prints a JSON object a line, such as by

  python -c "from strata_jax.pallas_kernels.chunk_attention import bench; bench.print_sweep()"
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.pallas_kernels import timing
from strata_jax.pallas_kernels.chunk_attention import api
from strata_jax.pallas_kernels.chunk_attention.arg_specs import ARG_SPECS, ChunkArgs

# (q [B, T, heads, D], pool, page_table, starts, lengths) -> [B, T, heads, D]
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

LENGTHS = ((33,), (50,), (33, 33), (33, 33, 33, 0), (33, 33, 33, 33), (33,) * 16)
CONFIGS = (
  api.ChunkAttentionConfig(),
  api.ChunkAttentionConfig(stages=3),
  api.ChunkAttentionConfig(stages=5),
  api.ChunkAttentionConfig(warpgroups=2),
  api.ChunkAttentionConfig(part_factor=1),
)
_CALLS = 8  # in one program, as of so many layers: starting a program takes as long as a small call


def measure(
  args: ChunkArgs,
  lengths: Sequence[int],
  context: int,
  *,
  attend: Attend,
  share_contexts: bool = False,
  calls: int = _CALLS,
  seed: int = 0,
) -> float:
  """Microseconds of one call.

  Every call of a program reads pages of its own, so that none finds them in the L2 cache.

  Args:
    args: shapes, such as one of `arg_specs`.
    lengths: tokens of the chunks; 0 is padding.
    context: tokens before each of them.
    attend: what is measured.
    share_contexts: whether the rows have all but their last pages in common.
    calls: in a program; each takes the queries from the output of the one before.
    seed: of the pages.
  """
  width = -(-(context + args.chunk) // args.page_size)
  pages = args.batch * width
  rng = np.random.default_rng(seed)
  tables = rng.permutation(calls * pages).astype(np.int32).reshape(calls, args.batch, width)
  if share_contexts:
    own = context // args.page_size
    tables[:, :, :own] = tables[:, :1, :own]
  q = jax.random.normal(jax.random.key(seed), args.q_shape(), jnp.bfloat16)
  pool = jnp.ones(args.pool_shape(calls * pages), jnp.bfloat16)

  @jax.jit
  def run(q, pool, tables, starts, lengths):
    for call in range(calls):
      q = attend(q, pool, tables[call], starts, lengths)
    return q

  starts = jnp.full((args.batch,), context, jnp.int32)
  operands = q, pool, jnp.asarray(tables), starts, jnp.asarray(lengths, jnp.int32)
  return timing.seconds_a_call(lambda: run(*operands)) / calls * 1e6


def kernel(
  config: api.ChunkAttentionConfig | None = None,
  implementation: api.Implementation = "mosaic_gpu",
) -> Attend:
  """What to `measure` of this package; a program makes its plan once for all calls."""

  def attend(q, pool, page_table, starts, lengths):
    _, _, page_size, kv_heads, _ = pool.shape
    plan = None
    if implementation != "reference":
      plan = api.make_plan(starts, lengths, kv_heads=kv_heads, page_size=page_size, config=config)
    return api.chunk_attention(
      q, pool, page_table, starts, lengths, plan=plan, implementation=implementation, config=config
    )

  return attend


def name_of(config: api.ChunkAttentionConfig) -> str:
  """Its fields in one word."""
  return "-".join(str(value) for value in dataclasses.astuple(config))


def sweep(
  *,
  model: str = "llama3.1-8b-tp1-page32-batch1",
  contexts: Iterable[int] = (20_000,),
  batches: Iterable[Sequence[int]] = LENGTHS,
  configs: Iterable[api.ChunkAttentionConfig] = CONFIGS,
  baseline: Attend | None = None,
  calls: int = _CALLS,
) -> Iterator[dict[str, object]]:
  """Times of every config and the baseline, with contexts apart and shared."""
  attends = {} if baseline is None else {"baseline": baseline}
  attends |= {name_of(config): kernel(config) for config in configs}
  for lengths in batches:
    args = dataclasses.replace(ARG_SPECS[model], batch=len(lengths))
    for context in contexts:
      for shared in (False, True)[: len(lengths)]:
        for name, attend in attends.items():
          us = measure(
            args, lengths, context, attend=attend, share_contexts=shared,
            calls=min(calls, 2) if len(lengths) > 4 else calls,
          )  # fmt: skip
          yield {
            "model": model, "lengths": list(lengths), "context": context,
            "contexts_shared": shared, "how": name, "us": round(us, 1),
          }  # fmt: skip


def print_sweep(**how) -> None:
  """Prints `sweep(**how)`."""
  for row in sweep(**how):
    print(json.dumps(row), flush=True)
