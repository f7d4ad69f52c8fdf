"""Decode attention: its parts, in the interpreter, lowered for an H200, and on a GPU."""

import dataclasses
import functools
import itertools
import json
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from strata_jax.executors import streams
from strata_jax.pallas_kernels import lowered_once
from strata_jax.pallas_kernels.attention_parts import merge, tiles, work_line
from strata_jax.pallas_kernels.decode_attention import (
  api,
  bench,
  mosaic_gpu,
  mosaic_merge,
  reference,
)
from strata_jax.pallas_kernels.decode_attention.arg_specs import ARG_SPECS, DecodeArgs
from tests.pallas_kernels import lowering, moves, random_pages

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
TOLERANCE = 2e-2  # bfloat16 weights of the values, values of about 1
SMALL = DecodeArgs(batch=2, heads=4, kv_heads=2, head_dim=64, page_size=8)
CONFIG = api.DecodeAttentionConfig()
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


def _batch(args: DecodeArgs, tokens, seed=0):
  """Random operands, see `pages_of`."""
  tokens = np.asarray(tokens, np.int32)
  rng = np.random.default_rng(seed)
  pool, table = random_pages.pages_of(args, tokens, rng)
  q = rng.standard_normal((len(tokens), *args.q_shape()[1:]), np.float32)
  return jnp.asarray(q, jnp.bfloat16), pool, table, jnp.asarray(tokens)


def _assert_close(got, want):
  for one, other in zip(got, want, strict=True):
    one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
    assert np.isfinite(one).all()
    np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE)


def test_reference_is_softmax_over_the_valid_tokens():
  q, pool, table, tokens = _batch(SMALL, [11, 0])
  out, lse = reference.attend(q, pool, table, tokens)
  kv = np.asarray(pool[table[0, :2]], np.float64)  # [2 pages, 2, page_size, kv_heads, D]
  for head in range(4):
    keys, values = (kv[:, kind, :, head // 2].reshape(16, 64)[:11] for kind in (0, 1))
    weights = np.exp(keys @ np.asarray(q[0, head], np.float64) / 8)
    np.testing.assert_allclose(out[0, head], weights @ values / weights.sum(), atol=1e-5)
    np.testing.assert_allclose(lse[0, head], np.log(weights.sum()), atol=1e-5)
  assert not np.asarray(out[1]).any()
  assert (np.asarray(lse[1]) == merge.NOTHING).all()


def test_merged_parts_are_the_whole_and_unused_ones_may_be_anything():
  rng = np.random.default_rng(1)
  scores, values = rng.normal(size=(2, 3, 30)) * 5, rng.normal(size=(2, 30, 8))
  out, lse = np.full((3, 4, 3, 8), np.nan), np.full((3, 4, 3), np.nan)
  for part, span in enumerate((slice(0, 1), slice(1, 20), slice(20, 30))):
    weights = np.exp(scores[..., span])
    out[:2, part] = weights @ values[:, span] / weights.sum(-1, keepdims=True)
    lse[:2, part] = np.log(weights.sum(-1))
  counts = jnp.array([3, 2, 0], jnp.int32)
  got = merge.merge_parts(jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32), counts)
  for row, stop in enumerate((30, 20)):
    weights = np.exp(scores[row, :, :stop])
    want = weights @ values[row, :stop] / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(got[0][row], want, atol=1e-5)
    np.testing.assert_allclose(got[1][row], np.log(weights.sum(-1)), atol=1e-5)
  assert not np.asarray(got[0][2]).any()
  assert (np.asarray(got[1][2]) == merge.NOTHING).all()


@pytest.mark.parametrize(("heads", "head_dim"), [(2, 128), slow(3, 64)])
@pytest.mark.parametrize("shared", [False, True])
def test_interpreted_merge_is_that_in_jnp(heads, head_dim, shared):
  """More parts than the warpgroups read at once; one row has none, whatever stands there."""
  rng = np.random.default_rng(2)
  items, rows = (8, 16) if shared else (4, 8)
  parts = np.array([40, 7, 0, 1, 0, 12, 0, 0][:items], np.int32)
  out = rng.standard_normal((items, 40, rows, head_dim), np.float32)
  lse = 3 * rng.standard_normal((items, 40, rows), np.float32)
  for item, count in enumerate(parts):
    out[item, count:] = lse[item, count:] = np.nan
  groups = work_line.no_groups(4)
  if shared:  # the rows 1 and 3
    groups = groups._replace(
      leaders=jnp.array([0, 1, 2, 1], jnp.int32), sides=jnp.array([0, 0, 0, 1], jnp.int32)
    )
  line = work_line.WorkLine(*[jnp.asarray(parts)] * 8)
  how = {"heads": heads, "dtype": jnp.float32}
  args = jnp.asarray(out), jnp.asarray(lse), line, groups
  got = mosaic_merge.merge_items(*args, **how, interpret=INTERPRET)
  assert not moves.races_found()
  for one, other in zip(got, merge.merge_items(*args, **how), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
  assert (np.asarray(got[1][2]) == merge.NOTHING).all()


@pytest.mark.parametrize(
  ("kv_heads", "page_size", "wanted", "rows"),
  [
    (8, 32, 64, 64),  # a quarter of a page
    (8, 16, 192, 128),  # 192 rows would be no whole number of pages
    (8, 16, 256, 256),
    (2, 16, 64, 64),  # two pages
    (2, 16, 192, 192),
    (8, 8, 64, 64),
    (1, 8, 64, 64),
    (3, 16, 64, 192),  # whole tokens of three heads, whole pages
    (3, 64, 256, 192),
    (5, 16, 64, None),  # 320 rows would be too many
    (7, 64, 64, None),
    (1, 4, 64, None),  # a copy has whole tiles of 8 rows
  ],
)
def test_a_tile_has_whole_tokens_and_whole_pages_or_an_equal_part(
  kv_heads, page_size, wanted, rows
):
  tile = tiles.find_tile(kv_heads, page_size, wanted)
  assert (tile and tile.rows) == rows
  if tile:
    assert tile.tokens * kv_heads == rows
    assert tile.pages * tile.copy_rows == rows
    assert tile.pages == 1 or tile.tiles_a_page == 1
    assert tile.pages * page_size == tile.tokens * tile.tiles_a_page


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
  counts=st.lists(st.integers(0, 3000), min_size=1, max_size=40),
  blocks=st.integers(1, 300),
  part_factor=st.integers(1, 4),
)
def test_shares_cover_all_tiles_and_no_row_has_too_many_parts(counts, blocks, part_factor):
  parts = tiles.most_parts(len(counts), blocks, part_factor)
  total, longest = sum(counts), max(counts)
  share = int(tiles.share(jnp.int32(total), jnp.int32(longest), blocks, parts))
  assert share >= 1
  assert share * blocks >= total
  starts = np.cumsum([0, *counts])
  for start, stop in itertools.pairwise(starts):
    if stop > start:
      assert (stop - 1) // share - start // share + 1 <= parts
  if longest * len(counts) <= part_factor * total:  # no row is much longer: all blocks work
    assert share == max(1, -(-total // blocks))


def test_a_third_of_the_rows_keeps_all_blocks_busy():
  parts = tiles.most_parts(28, CONFIG.blocks, CONFIG.part_factor)
  share = int(tiles.share(jnp.int32(10 * 2500), jnp.int32(2500), CONFIG.blocks, parts))
  assert share == -(-25_000 // CONFIG.blocks)


def _interpreted(operands, *, blocks, part_factor=2, stages=2, width=1, merges=2):
  """Groups, and results of the kernel in the interpreter: parts merged in jnp, and by a kernel."""
  q, pool, table, tokens = operands
  tile = tiles.find_tile(pool.shape[3], pool.shape[2], 64)
  groups = work_line.no_groups(len(q))
  if width > 1:
    groups = work_line.find_groups(table, tokens, width=width, tile=tile)
  most = tiles.most_parts(len(q), blocks, part_factor)
  line = work_line.make_line(tokens, groups, width=width, tile=tile, blocks=blocks, most_parts=most)
  out, lse = mosaic_gpu.attend(
    q, pool, table, line, tile=tile, stages=stages, most_parts=most, interpret=INTERPRET
  )
  assert not moves.races_found()
  assert int(line.parts.max()) <= most
  how = {"heads": q.shape[1], "dtype": jnp.float32}
  results = [merge.merge_items(out, lse, line, groups, **how)]
  if merges > 1:
    how["interpret"] = INTERPRET
    results.append(mosaic_merge.merge_items(out, lse, line, groups, **how))
  return groups, *results


@pytest.mark.parametrize(
  ("heads", "kv_heads", "page_size", "tokens", "blocks"),
  [
    (8, 2, 16, [50, 0, 17], 4),  # two pages a tile, a padded row in between
    slow(9, 3, 16, [70, 1], 2),  # heads that are padded; tiles of 192 rows
    slow(4, 1, 64, [64, 129, 63], 3),  # a tile is a page
    slow(4, 1, 8, [9], 4),  # eight pages a tile, of which two are valid
    slow(64, 8, 16, [0, 15, 40], 2),  # a whole product of heads
    (4, 2, 32, [0, 0], 2),  # nothing but padding
  ],
)
def test_interpreted_kernel_is_the_reference(heads, kv_heads, page_size, tokens, blocks):
  args = DecodeArgs(
    batch=len(tokens), heads=heads, kv_heads=kv_heads, head_dim=64, page_size=page_size
  )
  operands = _batch(args, tokens)
  _, got = _interpreted(operands, blocks=blocks, merges=1)
  _assert_close(got, reference.attend(*operands))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("heads", "kv_heads", "page_size", "tokens", "blocks"),
  [
    (16, 16, 8, [16, 8], 2),  # a KV head for each head; a page is two tiles
    (64, 1, 64, [64], 2),  # one KV head for all of a product
    (8, 2, 32, [0, 0, 64, 0], 5),  # one valid row among padding, over all its table
  ],
)
def test_full_tables_and_a_row_that_no_more_blocks_share_than_if_all_were_valid(
  heads, kv_heads, page_size, tokens, blocks
):
  args = DecodeArgs(
    batch=len(tokens), heads=heads, kv_heads=kv_heads, head_dim=64, page_size=page_size
  )
  q, pool, table, count = _batch(args, tokens)
  operands = q, pool, table[:, : max(tokens) // page_size], count
  _, *both = _interpreted(operands, blocks=blocks, part_factor=1, stages=3)
  for got in both:
    _assert_close(got, reference.attend(*operands))


def _share(operands, pairs):
  """The operands with the first pages of one row in the table of another."""
  q, pool, table, tokens = operands
  table = np.array(table)
  for source, row, pages in pairs:
    table[row, :pages] = table[source, :pages]
  return q, pool, jnp.asarray(table), tokens


@pytest.mark.parametrize(
  ("heads", "kv_heads", "tokens", "blocks", "pairs", "leaders"),
  [
    # The third that is alike has no place in a group of two.
    (32, 4, [80, 0, 70, 90], 3, [(0, 2, 3), (0, 3, 2)], [0, 1, 0, 3]),
    # Four to a product; one of them has nothing of its own.
    slow(9, 3, [64, 90, 70, 16, 75], 4, [(0, 1, 4), (0, 2, 4), (0, 4, 4)], [0, 0, 0, 3, 0]),
  ],
)
def test_rows_that_share_pages_read_them_together(
  monkeypatch, heads, kv_heads, tokens, blocks, pairs, leaders
):
  monkeypatch.setattr(work_line, "LEAST_SHARED_TOKENS", 32)
  args = DecodeArgs(batch=len(tokens), heads=heads, kv_heads=kv_heads, head_dim=64, page_size=16)
  operands = _share(_batch(args, tokens), pairs)
  width = tiles.group_width(heads)
  groups, *both = _interpreted(operands, blocks=blocks, width=width)
  assert groups.leaders.tolist() == leaders
  for got in both:
    _assert_close(got, reference.attend(*operands))


@st.composite
def _prefix_trees(draw):
  """Tables of rows that go the way of an earlier row for some pages, as of a radix tree."""
  page_size = draw(st.sampled_from([16, 32, 64]))
  tables, tokens, pages = [], [], itertools.count()
  for row in range(draw(st.integers(1, 9))):
    table = [next(pages) for _ in range(24)]
    tokens.append(draw(st.integers(0, 24 * page_size)))
    if row and draw(st.booleans()):
      source = draw(st.integers(0, row - 1))
      common = draw(st.integers(0, min(tokens[row], tokens[source]) // page_size))
      table[:common] = tables[source][:common]
    used = -(-tokens[row] // page_size)
    table[used:] = [draw(st.integers(-(2**31), 2**31 - 1))] * (24 - used)
    tables.append(table)
  return np.array(tables, np.int32), np.array(tokens, np.int32), page_size


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(batch=_prefix_trees(), width=st.integers(2, 4), blocks=st.integers(1, 40))
def test_groups_read_only_what_all_of_them_have_and_every_tile_is_read_once(batch, width, blocks):
  table, tokens, page_size = batch
  rows = len(table)
  tile = tiles.find_tile(8, page_size, 64)
  how = {"width": width, "tile": tile}
  groups = work_line.find_groups(jnp.asarray(table), jnp.asarray(tokens), **how)
  leaders, sides, shared = (np.asarray(array) for array in groups)
  assert (leaders[leaders] == leaders).all()
  for row in range(rows):
    assert shared[row] == shared[leaders[row]]
    assert shared[row] == 0 or shared[row] >= work_line.LEAST_SHARED_TOKENS
    assert shared[row] <= tokens[row]
    common = shared[row] // page_size
    assert common * page_size == shared[row]
    assert (table[row, :common] == table[leaders[row], :common]).all()
  for leader in set(leaders):
    members = np.flatnonzero(leaders == leader)
    assert sides[members].tolist() == list(range(len(members)))
    assert len(members) <= width
    assert (len(members) > 1) == (shared[leader] > 0)

  most = tiles.most_parts(rows, blocks, 2)
  line = work_line.make_line(jnp.asarray(tokens), groups, blocks=blocks, most_parts=most, **how)
  line = work_line.WorkLine(*(np.asarray(array) for array in line))
  read = np.zeros((rows, 24 * page_size // tile.tokens), int)  # how often a row attends to a tile
  parts = np.zeros(2 * rows, int)
  for block in range(blocks):
    first, end = block * line.share[0], (block + 1) * line.share[0]
    for item in range(line.first_items[block], line.end_items[block]):
      count = -(-line.tokens[item] // tile.tokens) - line.first_tiles[item]
      begin, stop = max(first - line.starts[item], 0), min(end - line.starts[item], count)
      if begin >= stop:
        continue
      assert block - line.starts[item] // line.share[0] == parts[item]  # where the part is written
      parts[item] += 1
      span = slice(line.first_tiles[item] + begin, line.first_tiles[item] + stop)
      for row in set(line.members[item]):
        read[row, span] += 1
  assert (parts == line.parts).all()
  assert parts.max() <= most
  for row in range(rows):
    used = -(-tokens[row] // tile.tokens)
    assert (read[row, :used] == 1).all()
    assert not read[row, used:].any()


def test_the_short_ends_of_all_rows_are_no_work_for_one_block():
  """24 rows in pairs of 20,000 tokens, each with a page of its own."""
  rows, pages = 24, 626
  table = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
  table[12:, :-1] = table[:12, :-1]
  tokens = jnp.full(rows, 20_010, jnp.int32)
  tile = tiles.find_tile(8, 32, 64)
  groups = work_line.find_groups(jnp.asarray(table), tokens, width=2, tile=tile)
  line = work_line.make_line(
    tokens, groups, width=2, tile=tile, blocks=CONFIG.blocks,
    most_parts=tiles.most_parts(rows, CONFIG.blocks, CONFIG.part_factor),
  )  # fmt: skip
  assert int(line.parts.sum()) > CONFIG.blocks
  assert int((line.end_items - line.first_items).max()) <= 16


def test_a_prompt_that_all_begin_with_does_not_mix_those_that_go_on_alike():
  """Of 20,000 tokens 320 are everybody's, the rest that of the next row but one."""
  table = np.arange(4 * 625, dtype=np.int32).reshape(4, 625)
  table[1:, :10] = table[0, :10]
  table[2, :600], table[3, :600] = table[0, :600], table[1, :600]
  tokens = jnp.full(4, 20_000, jnp.int32)
  tile = tiles.find_tile(8, 32, 64)
  groups = work_line.find_groups(jnp.asarray(table), tokens, width=2, tile=tile)
  assert groups.leaders.tolist() == [0, 1, 0, 1]
  assert groups.shared_tokens.tolist() == [19_200] * 4


def _shapes(args: DecodeArgs, pages: int = 1000):
  shape = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=lowering.DEVICE)
  return (
    shape(args.q_shape(), jnp.bfloat16),
    shape(args.pool_shape(pages), jnp.bfloat16),
    shape((args.batch, 700), jnp.int32),
    shape((args.batch,), jnp.int32),
  )


@pytest.mark.parametrize("name", ARG_SPECS)
def test_every_arg_spec_lowers_for_an_h200(name):
  shapes = _shapes(ARG_SPECS[name])
  assert api.supports(*shapes[:2])
  assert "mosaic_gpu" in lowering.lower(jax.jit(api.decode_attention), *shapes)


@pytest.mark.parametrize("config", bench.CONFIGS, ids=bench.name_of)
def test_every_config_of_the_bench_lowers_for_an_h200(config):
  shapes = _shapes(ARG_SPECS["llama3.1-8b-tp1-page32-batch28"])
  attend = jax.jit(bench.kernel(config))
  assert "mosaic_gpu" in lowering.lower(attend, *shapes)


def test_with_a_plan_it_is_lowered_once_for_all_programs(monkeypatch):
  lowered = lowering.count_lowered_once(monkeypatch)
  spec = ARG_SPECS["llama3.1-8b-tp1-page32-batch7"]
  q, pool, table, tokens = _shapes(spec)
  sizes = {"heads": q.shape[-2], "kv_heads": pool.shape[3], "page_size": pool.shape[2]}
  plan = jax.eval_shape(functools.partial(api.make_plan, **sizes), table, tokens)

  def layers(q, pool, table, tokens, plan, times):
    return [api.decode_attention(q + i, pool, table, tokens, plan=plan) for i in range(times)]

  for times in (1, 3):
    program = jax.jit(functools.partial(layers, times=times))
    assert "mosaic_gpu" in lowering.lower(program, q, pool, table, tokens, plan)
  assert len(lowered) == 1


def test_kernels_that_are_lowered_once_are_those_of_other_programs(monkeypatch):
  spec = ARG_SPECS["llama3.1-8b-tp1-page32-batch7"]
  q, pool, table, tokens = _shapes(spec)
  sizes = {"heads": q.shape[-2], "kv_heads": pool.shape[3], "page_size": pool.shape[2]}
  plan = jax.eval_shape(functools.partial(api.make_plan, **sizes), table, tokens)

  def kernels():
    attend = jax.jit(lambda *args: api.decode_attention(*args[:4], plan=args[4]))
    text = lowering.lower(attend, q, pool, table, tokens, plan)
    modules = re.findall(r' module = "((?:[^"\\]|\\.)*)"', text)
    return [re.sub(r"attention_\d+", "", module) for module in modules]  # they are numbered

  lowered_once._exported.cache_clear()
  once = kernels()
  monkeypatch.setattr(lowered_once, "call", lambda function, *args, **how: function(*args, **how))
  assert len(once) == 2
  assert once == kernels()


def test_pools_above_2_to_the_31_elements_lower():
  shapes = _shapes(ARG_SPECS["llama3.1-8b-tp1-page32-batch7"], pages=2**16)  # 2^32 elements
  assert "mosaic_gpu" in lowering.lower(jax.jit(api.decode_attention), *shapes)


def test_it_may_stand_in_a_region_with_a_stream_of_its_own():
  """No loop of XLA's and no call may stand there, beside what `streams` makes of it."""
  shapes = _shapes(ARG_SPECS["llama3.1-8b-tp1-page32-batch7"])
  equations = jax.make_jaxpr(api.decode_attention)(*shapes).jaxpr.eqns
  names = {equation.primitive.name for equation in equations}
  assert not names & {"jit", "while", "scan", "cond"}
  beside = lambda q, *rest: streams.beside(
    api.decode_attention, (q, *rest), lambda q: (2 * q,), (q,)
  )
  text = lowering.lower(jax.jit(beside), *shapes)
  assert '_xla_stream_annotation = "1"' in text
  assert "mosaic_gpu" in text
  assert "stablehlo.while" not in text


@pytest.mark.parametrize("rank", [3, 4])
def test_shapes_of_the_result_are_those_of_the_queries(rank):
  q, *rest = _batch(SMALL, [11, 0])
  q = q if rank == 3 else q[:, None]
  out, lse = api.decode_attention(q, *rest, implementation="reference")
  assert out.shape == q.shape
  assert out.dtype == jnp.bfloat16
  assert lse.shape == q.shape[:-1]


@pytest.mark.parametrize(
  ("change", "config", "message"),
  [
    ({"head_dim": 96}, CONFIG, "head_dim: expected 64 or 128, got 96"),
    ({"heads": 66}, CONFIG, "heads: expected at most 64, got 66"),
    ({"page_size": 12}, CONFIG, "page_size: expected a multiple of 8, at most 64"),
    ({"page_size": 128}, CONFIG, "page_size: expected a multiple of 8, at most 64"),
    ({"kv_heads": 5, "heads": 40, "page_size": 16}, CONFIG, "got 16 with 5 KV heads"),
    ({"head_dim": 128}, dataclasses.replace(CONFIG, stages=8), "for 8 tiles of 64 rows"),
  ],
)
def test_what_the_kernel_does_not_take_is_refused(change, config, message):
  shapes = _shapes(dataclasses.replace(SMALL, **change))
  assert not api.supports(*shapes[:2], config)
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda *args: api.decode_attention(*args, config=config), *shapes)


@pytest.mark.parametrize("which", [0, 1])
def test_other_dtypes_are_refused(which):
  shapes = list(_shapes(SMALL))
  shapes[which] = jax.ShapeDtypeStruct(shapes[which].shape, jnp.float32)
  assert not api.supports(*shapes[:2])
  with pytest.raises(ValueError, match=f"{('q', 'pool')[which]}: expected bfloat16, got float32"):
    jax.eval_shape(api.decode_attention, *shapes)


def test_operands_that_do_not_fit_are_refused():
  q, pool, table, tokens = _batch(SMALL, [11, 0])
  with pytest.raises(ValueError, match=r"q: expected \[B, heads, D\] or \[B, 1, heads, D\]"):
    api.decode_attention(jnp.stack([q, q], 1), pool, table, tokens)
  with pytest.raises(ValueError, match=r"pool: expected .* 64\], got"):
    api.decode_attention(q, pool[..., :32], table, tokens)
  with pytest.raises(ValueError, match="heads: expected a multiple of 2, got 3"):
    api.decode_attention(q[:, :3], pool, table, tokens)
  with pytest.raises(ValueError, match="page_table and tokens: expected"):
    api.decode_attention(q, pool, table, tokens[:1])


@pytest.mark.parametrize("change", [{"rows": 3}, {"heads": 64}, {"blocks": 8}, {"apart": True}])
def test_plans_for_other_shapes_are_refused(change):
  q, pool, table, tokens = _shapes(ARG_SPECS["llama3.1-8b-tp1-page32-batch7"])
  config = api.DecodeAttentionConfig(
    blocks=change.get("blocks", 264), share_prefixes="apart" not in change
  )
  rows = change.get("rows", len(q))
  plan = jax.eval_shape(
    functools.partial(
      api.make_plan, heads=change.get("heads", q.shape[-2]), kv_heads=pool.shape[3],
      page_size=pool.shape[2], config=config,
    ),
    jax.ShapeDtypeStruct((rows, table.shape[1]), jnp.int32),
    jax.ShapeDtypeStruct((rows,), jnp.int32),
  )  # fmt: skip
  attend = functools.partial(api.decode_attention, config=CONFIG)
  with pytest.raises(ValueError, match=r"plan: expected \(items, width, tile, config\) of"):
    jax.eval_shape(lambda *a: attend(*a[:4], plan=a[4]), q, pool, table, tokens, plan)


@pytest.mark.parametrize(
  ("field", "value", "wanted"),
  [
    ("blocks", 0, "an integer >= 1"),
    ("tile_rows", 96, "one of 64, 128, 192, 256"),
    ("stages", 0, "an integer >= 1"),
    ("part_factor", 0, "an integer >= 1"),
    ("merge_kernel", None, "one of False, True"),
    ("share_prefixes", None, "one of False, True"),
  ],
)
def test_config_out_of_range_is_refused(field, value, wanted):
  with pytest.raises(ValueError, match=f"DecodeAttentionConfig.{field}: expected {wanted}"):
    api.DecodeAttentionConfig(**{field: value})


def test_the_bench_runs_with_the_reference(capsys):
  attend = bench.kernel(implementation="reference")
  rates = bench.measure(SMALL, [20, 0], attend=attend, rows_a_context=2, calls=2)
  assert set(rates) == {"us", "gbps"}
  assert all(rate > 0 for rate in rates.values())
  model = "smollm2-135m-tp1-page16-batch7"
  how = {"batches": (3,), "contexts": (20,), "configs": (), "baseline": attend, "calls": 1}
  bench.print_sweep(model=model, **how)
  rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert [(row["batch"], row["valid"]) for row in rows] == [(3, 1), (3, 2), (3, 3)]
  assert all(row["us"] > 0 and row["how"] == "baseline" for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARG_SPECS)
def test_every_arg_spec_is_the_reference_on_a_gpu(name):
  args = ARG_SPECS[name]
  page, tile = args.page_size, tiles.find_tile(args.kv_heads, args.page_size, CONFIG.tile_rows)
  step = tile.tokens
  lengths = [0, 1, page - 1, page, page + 1, step - 1, step, step + 1, 4 * step - 1, 0, 1999, 5000]
  run = jax.jit(api.decode_attention)
  for number in range(0, len(lengths), args.batch):
    operands = _batch(args, np.resize(lengths[number:], args.batch), seed=number)
    _assert_close(run(*operands), reference.attend(*operands))


@pytest.mark.gpu
@pytest.mark.parametrize(
  "model", ["llama3.1-8b-tp1-page32", "llama3.1-8b-tp2-page64", "smollm2-135m-tp1-page16"]
)
def test_rows_that_share_pages_are_the_reference_on_a_gpu(model):
  args = ARG_SPECS[f"{model}-batch7"]
  tokens = [5000, 0, 4990, 800, 5001, 4999, 2600]
  operands = _batch(args, tokens)
  pages = 2560 // args.page_size
  operands = _share(operands, [(0, 2, pages), (0, 4, pages), (0, 6, pages)])
  for share_prefixes in (False, True):
    config = dataclasses.replace(CONFIG, share_prefixes=share_prefixes)
    run = jax.jit(lambda *operands, config=config: api.decode_attention(*operands, config=config))
    _assert_close(run(*operands), reference.attend(*operands))


@pytest.mark.gpu
@pytest.mark.parametrize("config", bench.CONFIGS, ids=bench.name_of)
def test_every_config_is_the_reference_on_a_gpu(config):
  args = ARG_SPECS["llama3.1-8b-tp1-page32-batch7"]
  run = jax.jit(lambda *operands: api.decode_attention(*operands, config=config))
  for seed, tokens in enumerate(
    ([20_000, 0, 3, 19_999, 0, 801, 64], [0] * 7, [0, 0, 1, 0, 0, 0, 0])
  ):
    operands = _batch(args, tokens, seed)
    _assert_close(run(*operands), reference.attend(*operands))


@pytest.mark.gpu
def test_beside_other_work_it_is_the_reference_on_a_gpu():
  args = ARG_SPECS["llama3.1-8b-tp1-page32-batch7"]
  operands = _batch(args, [4000, 0, 3, 1999, 0, 801, 64])
  run = jax.jit(
    lambda q, *rest: streams.beside(api.decode_attention, (q, *rest), lambda q: (2 * q,), (q,))[0],
    compiler_options=streams.COMPILER_OPTIONS,
  )
  _assert_close(run(*operands), reference.attend(*operands))


@pytest.mark.gpu
@pytest.mark.slow
def test_pools_above_2_to_the_31_elements_on_a_gpu():
  args = dataclasses.replace(ARG_SPECS["llama3.1-8b-tp1-page32-batch7"], batch=1)
  q, small, table, tokens = _batch(args, [150])
  pages = 2**15 + 64  # of 2^16 elements each
  first = pages - len(small)
  pool = jnp.zeros(args.pool_shape(pages), jnp.bfloat16).at[first:].set(small)
  got = jax.jit(api.decode_attention)(q, pool, table + first, tokens)
  _assert_close(got, reference.attend(q, small, table, tokens))
