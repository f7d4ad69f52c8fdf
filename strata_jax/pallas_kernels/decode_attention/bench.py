"""Rates of decode attention, beside those of another function.

`print_sweep` prints a JSON object a line, such as by

  python -c "from strata_jax.pallas_kernels.decode_attention import bench; bench.print_sweep()"
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.pallas_kernels import timing
from strata_jax.pallas_kernels.decode_attention import api
from strata_jax.pallas_kernels.decode_attention.arg_specs import ARG_SPECS, DecodeArgs

# (q [B, 1, heads, D], pool, page_table, tokens) -> [B, 1, heads, D], as of `decode_attention`
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

BATCHES = (1, 7, 16, 28)
CONTEXTS = (4096, 20_000)
VALID = (1 / 3, 1 / 2, 1)
CONFIGS = (
  api.DecodeAttentionConfig(),
  api.DecodeAttentionConfig(stages=2),
  api.DecodeAttentionConfig(blocks=132, stages=6),
  api.DecodeAttentionConfig(blocks=132, tile_rows=128, stages=3),
  api.DecodeAttentionConfig(blocks=528),
  api.DecodeAttentionConfig(part_factor=1),
  api.DecodeAttentionConfig(merge_kernel=False),
  api.DecodeAttentionConfig(share_prefixes=False),
)
_CALLS = 8  # in one program, as of so many layers: starting a program takes as long as a small call


def measure(
  args: DecodeArgs,
  tokens: Iterable[int],
  *,
  attend: Attend,
  rows_a_context: int = 1,
  calls: int = _CALLS,
  seed: int = 0,
) -> dict[str, float]:
  """Time of one call and the rate at which it takes in the KV of the valid tokens.

  What rows share counts for each of them, so with sharing the rate may be above that of the memory.

  Every call of a program reads pages of its own, so that none finds them in the L2 cache.

  Args:
    args: shapes, such as one of `arg_specs`.
    tokens: of every row; 0 is padding.
    attend: what is measured.
    rows_a_context: so many rows, as far apart as can be, have all but their last page in common.
    calls: in a program; each takes the queries from the output of the one before.
    seed: of the pages.

  Returns:
    `us` and `gbps`.
  """
  lengths = np.asarray(list(tokens), np.int32)
  width = -(-int(max(lengths.max(), 1)) // args.page_size)
  pages = args.batch * width
  rng = np.random.default_rng(seed)
  tables = rng.permutation(calls * pages).astype(np.int32).reshape(calls, args.batch, width)
  contexts = -(-args.batch // rows_a_context)
  for row in range(contexts, args.batch):
    tables[:, row, :-1] = tables[:, row % contexts, :-1]
  key = jax.random.key(seed)
  q = jax.random.normal(key, (args.batch, 1, *args.q_shape()[1:]), jnp.bfloat16)
  pool = jnp.ones(args.pool_shape(calls * pages), jnp.bfloat16)

  @jax.jit
  def run(q, pool, tables, lengths):
    for call in range(calls):
      q = attend(q, pool, tables[call], lengths)
    return q

  operands = q, pool, jnp.asarray(tables), jnp.asarray(lengths)
  seconds = timing.seconds_a_call(lambda: run(*operands)) / calls
  read_bytes = int(lengths.sum()) * 4 * args.kv_heads * args.head_dim
  return {"us": seconds * 1e6, "gbps": read_bytes / seconds / 1e9}


def kernel(
  config: api.DecodeAttentionConfig | None = None,
  implementation: api.Implementation = "mosaic_gpu",
) -> Attend:
  """What to `measure` of this package."""
  return lambda *args: api.decode_attention(*args, implementation=implementation, config=config)[0]


def name_of(config: api.DecodeAttentionConfig) -> str:
  """Its fields in one word."""
  return "-".join(str(int(value)) for value in dataclasses.astuple(config))


def sweep(
  *,
  model: str = "llama3.1-8b-tp1-page32-batch28",
  batches: Iterable[int] = BATCHES,
  contexts: Iterable[int] = CONTEXTS,
  configs: Iterable[api.DecodeAttentionConfig] = CONFIGS,
  rows_a_context: int = 1,
  baseline: Attend | None = None,
  calls: int = _CALLS,
) -> Iterator[dict[str, float | str]]:
  """Rates of every config and the baseline for batches with a third, half and all rows valid."""
  attends = {} if baseline is None else {"baseline": baseline}
  attends |= {name_of(config): kernel(config) for config in configs}
  for batch in batches:
    args = dataclasses.replace(ARG_SPECS[model], batch=batch)
    for context in contexts:
      for rows in dict.fromkeys(max(1, round(part * batch)) for part in VALID):
        tokens = [context] * rows + [0] * (batch - rows)
        few = min(calls, 2) if rows * context > 100_000 else calls
        for name, attend in attends.items():
          rates = measure(args, tokens, attend=attend, rows_a_context=rows_a_context, calls=few)
          row = {"model": model, "batch": batch, "valid": rows, "context": context, "how": name}
          row["rows_a_context"] = rows_a_context
          yield row | {unit: round(rate, 1) for unit, rate in rates.items()}


def print_sweep(**how) -> None:
  """Prints `sweep(**how)`."""
  for row in sweep(**how):
    print(json.dumps(row), flush=True)
