"""`merge.merge_items` by a kernel: one launch, and only the parts that a row has are read."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from strata_jax.pallas_kernels.attention_parts import merge, tiles, work_line

_LANES = 128  # threads of a warpgroup, a value each
_WARPGROUPS = 4
_PARTS = 8  # that a warpgroup reads at once


def merge_items(
  out: jax.Array,
  lse: jax.Array,
  line: work_line.WorkLine,
  groups: work_line.Groups,
  *,
  heads: int,
  dtype: jax.typing.DTypeLike,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
  """See `merge.merge_items`; D is 64 or 128, and `interpret` runs it on a CPU."""
  items, _, rows, head_dim = out.shape
  batch, padded = len(groups.leaders), tiles.padded_heads(heads)
  width = _LANES // head_dim  # heads that a thread block merges, side by side
  blocks = -(-heads // width)

  def merge_attention(
    out, lse, parts, leaders, sides, merged, merged_lse, values_smem, stats_smem, ready
  ):
    row, block = lax.axis_index("row"), lax.axis_index("block")
    group = lax.axis_index("warpgroup")
    alone = count = parts[row]
    shared_item, shared_row = row, jnp.int32(0)
    if items > batch:
      shared_item, shared_row = batch + leaders[row], sides[row] * padded
      count = alone + parts[shared_item]
    lane = plgpu.broadcasted_iota(jnp.int32, (_LANES,), 0, layout=_layout())
    own = [lax.div(lane, jnp.int32(head_dim)) == head for head in range(width)]

    def per_lane(scalars):
      """One value a head as one a lane."""
      found = jnp.full((_LANES,), scalars[0])
      for mask, scalar in zip(own[1:], scalars[1:], strict=True):
        found = jnp.where(mask, scalar, found)
      return found

    def add(state, found):
      """Adds parts, pairs of their values and their log-sum-exp a head."""
      values, high, total = state
      higher, weights = [], []
      for head in range(width):
        scores = [scores[head] for _, scores in found]
        top = high[head]
        for score in scores:
          top = lax.max(top, score)
        higher.append(top)
        weights.append([jnp.exp(score - top) for score in scores])
      fade = [jnp.exp(old - new) for old, new in zip(high, higher, strict=True)]
      total = [old * by + sum(new) for old, by, new in zip(total, fade, weights, strict=True)]
      values = values * per_lane(fade)
      for number, (part, _) in enumerate(found):
        values = values + part * per_lane([weights[head][number] for head in range(width)])
      return values, tuple(higher), tuple(total)

    def step(index, state):
      first = (index * _WARPGROUPS + group) * _PARTS
      found = []
      for number in range(_PARTS):
        part = lax.min(first + number, count - 1)
        is_shared = part >= alone
        item = lax.select(is_shared, shared_item, row)
        part = part - lax.select(is_shared, alone, jnp.int32(0))
        skipped = lax.select(is_shared, shared_row, jnp.int32(0))  # rows of other members
        head_row = skipped + block * width
        scores = [
          lax.select(first + number < count, lse[item, part, head_row + head], merge.NOTHING)
          for head in range(width)
        ]
        source = out.at[item, part, pl.ds(skipped * head_dim + block * _LANES, _LANES)]
        found.append((plgpu.load(source, layout=_layout()), scores))
      return add(state, found)

    steps = lax.div(count - group * _PARTS + (_WARPGROUPS * _PARTS - 1), _WARPGROUPS * _PARTS)
    nothing = (jnp.float32(merge.NOTHING),) * width, (jnp.float32(0),) * width
    zeros = plgpu.layout_cast(jnp.zeros((_LANES,), jnp.float32), _layout())
    values, high, total = lax.fori_loop(0, steps, step, (zeros, *nothing))

    values_smem[group] = values
    for head in range(width):
      stats_smem[group, head] = high[head]
      stats_smem[group, width + head] = total[head]
    plgpu.barrier_arrive(ready)

    @pl.when(group == 0)
    def _():
      plgpu.barrier_wait(ready)
      highs = [[stats_smem[g, head] for head in range(width)] for g in range(_WARPGROUPS)]
      totals = [[stats_smem[g, width + head] for head in range(width)] for g in range(_WARPGROUPS)]
      tops = [_largest([highs[g][head] for g in range(_WARPGROUPS)]) for head in range(width)]
      weights = [
        [jnp.exp(high - top) for high, top in zip(highs[g], tops, strict=True)]
        for g in range(_WARPGROUPS)
      ]
      sums = [
        lax.max(sum(weights[g][head] * totals[g][head] for g in range(_WARPGROUPS)), 1e-30)
        for head in range(width)
      ]
      values = zeros
      for g in range(_WARPGROUPS):
        part = plgpu.load(values_smem.at[g], layout=_layout())
        values = values + part * per_lane([w / s for w, s in zip(weights[g], sums, strict=True)])
      merged[row, pl.ds(block * _LANES, _LANES)] = values.astype(dtype)
      for head in range(width):
        found = lax.select(count > 0, tops[head] + jnp.log(sums[head]), merge.NOTHING)
        merged_lse[row, block * width + head] = found

  flat = out.reshape(items, -1, rows * head_dim)
  merged, merged_lse = plgpu.kernel(
    merge_attention,
    out_type=(
      jax.ShapeDtypeStruct((batch, blocks * _LANES), dtype),
      jax.ShapeDtypeStruct((batch, blocks * width), jnp.float32),
    ),
    scratch_types=(
      plgpu.SMEM((_WARPGROUPS, _LANES), jnp.float32),
      plgpu.SMEM((_WARPGROUPS, 2 * width), jnp.float32),
      plgpu.Barrier(num_arrivals=_WARPGROUPS),
    ),
    grid=(batch, blocks),
    grid_names=("row", "block"),
    num_threads=_WARPGROUPS,
    thread_name="warpgroup",
    interpret=interpret,
  )(flat, lse, line.parts, groups.leaders, groups.sides)
  return merged.reshape(batch, -1, head_dim)[:, :heads], merged_lse[:, :heads]


def _largest(scalars):
  top = scalars[0]
  for scalar in scalars[1:]:
    top = lax.max(top, scalar)
  return top


def _layout():
  return plgpu.Layout.WG_STRIDED((_LANES,), vec_size=1)
