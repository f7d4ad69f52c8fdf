"""The fragment moves: in the interpreter, lowered for an H200, and on a GPU."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from strata_jax.pallas_kernels.fragment_io import api, mosaic_gpu, reference
from strata_jax.pallas_kernels.fragment_io.arg_specs import ARG_SPECS
from strata_jax.tiers import layout
from tests.pallas_kernels import lowering, moves

BUCKET = 8
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
SMALL = layout.PageLayout(num_layers=3, page_size=2, kv_heads=1, head_dim=64)


@pytest.fixture(scope="module")
def rng():
  return np.random.default_rng(7)


@pytest.mark.parametrize("count", [0, 5, BUCKET])
@pytest.mark.parametrize(
  ("layer", "blocks", "sort"), [(None, 1, False), (None, 2, True), (2, 3, False)]
)
def test_interpreted_kernel_is_the_reference(rng, count, layer, blocks, sort):
  host, device = moves.random_pools(rng, SMALL, 12, 10)
  device = device if layer is None else device[:1]
  how = {
    "layer": layer,
    "blocks": blocks,
    "sort": sort,
    "loads_in_flight": 4,
    "interpret": INTERPRET,
  }
  lists = moves.random_lists(rng, BUCKET, 12, 10, count)
  got = mosaic_gpu.load(host, device, lists.reads, lists.writes, jnp.int32(count), **how)
  want = api.load_fragments(
    host, device, lists.reads, lists.writes, count, layer=layer, implementation="reference"
  )
  moves.assert_same(got, want)
  assert not moves.races_found()
  lists = moves.random_lists(rng, BUCKET, 10, 12, count)
  got = mosaic_gpu.store(device, host, lists.reads, lists.writes, jnp.int32(count), **how)
  want = api.store_fragments(
    device, host, lists.reads, lists.writes, count, layer=layer, implementation="reference"
  )
  moves.assert_same(got, want)
  assert not moves.races_found()


def test_the_interpreter_sees_slots_that_are_written_twice(rng, capsys):
  host, device = moves.random_pools(rng, SMALL, 4, 4)
  reads, writes = jnp.array([0, 1], jnp.int32), jnp.array([2, 2], jnp.int32)
  how = {"layer": None, "blocks": 2, "sort": False, "loads_in_flight": 4, "interpret": INTERPRET}
  jax.block_until_ready(mosaic_gpu.load(host, device, reads, writes, jnp.int32(2), **how))
  assert moves.races_found()
  assert "RACE DETECTED" in capsys.readouterr().out


@hypothesis.settings(max_examples=4, deadline=None)
@hypothesis.given(
  kv_heads=st.integers(1, 3),
  page_size=st.integers(1, 3),
  dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
  seed=st.integers(0, 2**16),
)
def test_interpreted_kernel_takes_any_page(kv_heads, page_size, dtype, seed):
  rng = np.random.default_rng(seed)
  page_layout = dataclasses.replace(
    SMALL, num_layers=2, kv_heads=kv_heads, page_size=page_size, dtype=dtype
  )
  host, device = moves.random_pools(rng, page_layout, 9, 9)
  lists = moves.random_lists(rng, 4, 9, 9)
  count = jnp.int32(lists.count)
  how = {"layer": None, "blocks": 2, "sort": False, "loads_in_flight": 4, "interpret": INTERPRET}
  got = mosaic_gpu.load(host, device, lists.reads, lists.writes, count, **how)
  moves.assert_same(got, reference.load(host, device, lists.reads, lists.writes, count))


def test_sorting_keeps_the_pairs_and_puts_valid_entries_first():
  host = jnp.array([9, 2, 5, 1, 1], jnp.int32)
  device = jnp.array([0, 1, 2, 3, 4], jnp.int32)
  ordered, partners = mosaic_gpu.by_host_slot(host, device, 3)
  assert ordered[:3].tolist() == [2, 5, 9]
  assert partners[:3].tolist() == [1, 2, 0]


@pytest.mark.parametrize("name", ARG_SPECS)
def test_every_arg_spec_lowers_for_an_h200_in_place(name):
  page_layout = ARG_SPECS[name]
  host = lowering.page_first(page_layout, 100_000, lowering.HOST)
  device = lowering.layer_first(page_layout, 1000)
  slots, scalar = lowering.slots(64), lowering.scalar()
  load = jax.jit(api.load_fragments, donate_argnums=1)
  store = jax.jit(api.store_fragments, donate_argnums=1, out_shardings=lowering.HOST)
  layer = jax.jit(
    lambda host, pool, *args: api.load_fragments(host, (pool,), *args[:3], layer=args[3]),
    donate_argnums=1,
  )
  for text, written in (
    (lowering.lower(load, host, device, slots, slots, scalar), page_layout.num_layers),
    (lowering.lower(store, device, host, slots, slots, scalar), 1),
    (lowering.lower(layer, host, device[0], slots, slots, scalar, scalar), 1),
  ):
    assert "mosaic_gpu" in text
    assert "pinned_host" in text
    assert text.count("tf.aliasing_output") == written


def test_pools_above_2_to_the_31_elements_lower():
  page_layout = ARG_SPECS["llama3.1-8b-tp1-page1"]
  host = lowering.page_first(page_layout, 2**18, lowering.HOST)  # 2^34 elements
  device = lowering.layer_first(page_layout, 2**21)  # 2^32 elements a layer
  slots = lowering.slots(64)
  load = jax.jit(api.load_fragments, donate_argnums=1)
  assert "mosaic_gpu" in lowering.lower(load, host, device, slots, slots, lowering.scalar())


def test_sorting_starts_at_the_configured_length():
  page_layout = dataclasses.replace(SMALL, num_layers=1)
  host = lowering.page_first(page_layout, 100, lowering.HOST)
  device = lowering.layer_first(page_layout, 100)
  config = api.FragmentIoConfig(sort_from=64)
  load = jax.jit(lambda *args: api.load_fragments(*args, config=config), donate_argnums=1)
  text = {
    bucket: lowering.lower(load, host, device, *(lowering.slots(bucket),) * 2, lowering.scalar())
    for bucket in (63, 64)
  }
  assert "stablehlo.sort" not in text[63]
  assert "stablehlo.sort" in text[64]


@pytest.mark.parametrize(
  ("bucket", "blocks", "run_bytes", "sorts"),
  [
    (16384, 2, 4096, True),
    (16383, 2, 4096, False),
    (16384, 3, 4096, False),  # full without
    (16384, 4, 2048, True),
    (16384, 1, 131072, True),
    (16384, 2, 131072, False),
  ],
)
def test_lists_are_sorted_where_the_link_is_not_full_without(bucket, blocks, run_bytes, sorts):
  assert api.FragmentIoConfig().sorts(bucket, blocks, run_bytes) is sorts


def test_a_fragment_of_no_whole_16_bytes_is_refused(rng):
  page_layout = layout.PageLayout(num_layers=1, page_size=1, kv_heads=1, head_dim=3, dtype="int8")
  host, device = moves.random_pools(rng, page_layout, 4, 4)
  slots = jnp.zeros(4, jnp.int32)
  with pytest.raises(ValueError, match="fragment_bytes: expected a multiple of 16, got 6"):
    api.load_fragments(host, device, slots, slots, 4)
  with pytest.raises(ValueError, match="fragment_bytes: expected a multiple of 16, got 6"):
    api.store_fragments(device, host, slots, slots, 4)


def test_pools_that_do_not_fit_are_refused(rng):
  host, device = moves.random_pools(rng, SMALL, 4, 4)
  slots = jnp.zeros(4, jnp.int32)
  with pytest.raises(ValueError, match="device pools: expected 3, got 2"):
    api.load_fragments(host, device[:2], slots, slots, 4)
  with pytest.raises(ValueError, match="device pool: expected fragments float32"):
    api.store_fragments(tuple(pool[:, :1] for pool in device), host, slots, slots, 4)
  with pytest.raises(ValueError, match="two lists of one length"):
    api.load_fragments(host, device, slots, slots[:2], 2)
  with pytest.raises(ValueError, match="layer: expected 0 <= layer < 3, got 3"):
    api.load_fragments(host, device[:1], slots, slots, 4, layer=3)


@pytest.mark.parametrize(
  ("field", "value"),
  [("load_blocks", 0), ("store_blocks", 2000), ("sort_from", -1), ("sort_below_bytes", -1)],
)
def test_config_out_of_range_is_refused(field, value):
  with pytest.raises(ValueError, match=f"FragmentIoConfig.{field}: expected an integer"):
    api.FragmentIoConfig(**{field: value})


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARG_SPECS)
def test_every_arg_spec_moves_the_right_bytes_on_a_gpu(name):
  """100 random lists each, both directions; neighbours of written pages count, too."""
  page_layout = ARG_SPECS[name]
  sort = page_layout.page_size in (1, 32)
  config = api.FragmentIoConfig(sort_from=0 if sort else 1024, sort_below_bytes=1 << 30)
  assert _wrong_bytes(page_layout, config, "mosaic_gpu") == 0


def test_the_comparison_of_bytes_finds_what_is_wrong(monkeypatch):
  """The check that runs on a GPU, here with the reference: right, and one that drops a page."""
  config = api.FragmentIoConfig()
  assert _wrong_bytes(SMALL, config, "reference", lists=5) == 0
  load = reference.load
  monkeypatch.setattr(reference, "load", lambda *args: load(*args[:4], args[4] - 1))
  assert _wrong_bytes(SMALL, config, "reference", lists=5) > 0


def _wrong_bytes(page_layout, config, implementation, lists: int = 100) -> int:
  """How many values differ from twins in device memory that are page-first on both sides."""
  rng = np.random.default_rng(3)
  pages, bucket = 20, 8
  pinned = _pinned()
  how = {"config": config, "implementation": implementation}
  load = jax.jit(lambda *args: api.load_fragments(*args, **how), donate_argnums=1)
  store = jax.jit(
    lambda *args: api.store_fragments(*args, **how), donate_argnums=1, out_shardings=pinned
  )
  host_twin, device = moves.random_pools(rng, page_layout, pages, pages)
  device_twin = jnp.stack(device, axis=1)
  host = jax.device_put(host_twin, pinned)
  wrong = []
  for number in range(lists):
    count = {0: 0, 1: bucket}.get(number)  # an empty list, a full bucket, then any
    args = _on_device(moves.random_lists(rng, bucket, pages, pages, count))
    device = load(host, device, *args)
    device_twin = _move_pages(host_twin, device_twin, *args)
    wrong.append(_differences(device, device_twin))
    args = _on_device(moves.random_lists(rng, bucket, pages, pages, count))
    host = store(device, host, *args)
    host_twin = _move_pages(device_twin, host_twin, *args)
    wrong.append(_differences(jax.device_put(host, host_twin.sharding), host_twin))
  return sum(int(number) for number in wrong)


def _on_device(lists: moves.Lists):
  return jnp.asarray(lists.reads), jnp.asarray(lists.writes), jnp.int32(lists.count)


@jax.jit
def _move_pages(source, target, reads, writes, count):
  valid = jnp.arange(reads.shape[0]) < count
  fragments = source[jnp.where(valid, reads, 0)]
  return target.at[jnp.where(valid, writes, target.shape[0])].set(fragments, mode="drop")


@jax.jit
def _differences(got, twin):
  pages = jnp.stack(got, axis=1) if isinstance(got, tuple) else got
  return jnp.sum(pages != twin)


@pytest.mark.gpu
def test_no_copy_in_the_compiled_program_on_a_gpu():
  page_layout = ARG_SPECS["llama3.1-8b-tp1-page1"]
  host = jax.device_put(jnp.zeros(page_layout.host_shape(64), jnp.bfloat16), _pinned())
  device = tuple(jnp.zeros(page_layout.device_shape(64), jnp.bfloat16) for _ in range(32))
  slots, count = jnp.arange(8, dtype=jnp.int32), jnp.int32(8)
  load = jax.jit(api.load_fragments, donate_argnums=1)
  store = jax.jit(api.store_fragments, donate_argnums=1, out_shardings=_pinned())
  layer = jax.jit(
    lambda host, pool, *slots: api.load_fragments(host, (pool,), *slots, layer=3)[0],
    donate_argnums=1,
  )
  texts = [
    load.lower(host, device, slots, slots, count).compile().as_text(),
    store.lower(device, host, slots, slots, count).compile().as_text(),
    layer.lower(host, device[0], slots, slots, count).compile().as_text(),
  ]
  for text in texts:
    assert "copy(" not in text
    assert "copy-start" not in text


@pytest.mark.gpu
@pytest.mark.slow
def test_pools_above_2_to_the_31_elements_on_a_gpu():
  page_layout = layout.PageLayout(num_layers=1, page_size=1, kv_heads=8, head_dim=128, dtype="int8")
  pages = (2**31 + 2**27) // page_layout.fragment_bytes  # 2.1 GiB
  last = pages - 1
  device = (jnp.zeros(page_layout.device_shape(pages), jnp.int8).at[last].set(3),)
  host = jax.device_put(np.zeros(page_layout.host_shape(pages), np.int8), _pinned())
  one = lambda slot: jnp.array([slot], jnp.int32)
  store = jax.jit(api.store_fragments, donate_argnums=1, out_shardings=_pinned())
  load = jax.jit(api.load_fragments, donate_argnums=1)
  host = store(device, host, one(last), one(last - 1), jnp.int32(1))
  (pool,) = load(host, device, one(last - 1), one(last - 2), jnp.int32(1))
  assert np.asarray(pool[last - 3 :, 0, 0, 0, 0]).tolist() == [0, 3, 0, 3]


def _pinned():
  return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
