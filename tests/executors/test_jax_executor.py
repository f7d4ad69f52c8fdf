"""The executor on a complete small model with exact expected outputs, and on random weights."""

import functools
import json
import time

import numpy as np
import pytest

from strata_jax import config as config_lib
from strata_jax.executors import buckets, choices, jax_executor, protocol
from strata_jax.models import loader, random
from strata_jax.tiers import device as device_tier
from strata_jax.tiers import host as host_tier
from tests.executors import driver
from tests.shared_data import shared_data

PAGE_SIZES = (1, 4, 16)


@functools.cache
def stories():
  config, params, _ = loader.load_model(str(shared_data("stories260K/config.json").parent))
  return config, params


def goldens():
  return json.loads(shared_data("stories260K/golden.json").read_text())


@functools.cache
def tiny():
  config = config_lib.MODELS["tiny"]
  return config, random.random_params(config, seed=3)


def tiny_driver(page_size=4, device_pages=64, host_pages=32, **options):
  executor = driver.make_executor(
    *tiny(), page_size, device_pages=device_pages, host_pages=host_pages, context=128, **options
  )
  return driver.Driver(executor, page_size)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_stories_cold_from_device_hits_and_after_a_host_round_trip(page_size):
  config, params = stories()
  total = driver.pages(512, page_size)
  executor = driver.make_executor(
    config, params, page_size, device_pages=2 * total, host_pages=total
  )
  executor.warmup()
  drive = driver.Driver(executor, page_size)
  slots = np.random.default_rng(0).permutation(2 * total)
  device_at = device_tier.buffer_pointers(executor.device_pool)
  host_at = executor.host_pool.unsafe_buffer_pointer()
  for case in goldens():
    prompt, count = case["prompt_ids"], len(case["greedy_ids"])
    here, there = slots[:total], slots[total:]
    assert drive.generate(1, prompt, count, here) == case["greedy_ids"], case["name"]
    hit = (len(prompt) - 1) // page_size  # whole pages, at least one token is computed
    # The first pages are a hit, all other pages are new ones.
    mixed = np.concatenate([here[:hit], there[hit:]])
    assert drive.generate(2, prompt, count, mixed, hit * page_size) == case["greedy_ids"]
    if not hit:
      continue
    kept = np.arange(total)[::-1][:hit]
    drive.backup(here[:hit], kept)
    drive.generate(3, prompt[::-1], count, here)  # writes over the pages
    drive.load(kept, there[:hit])
    assert drive.generate(4, prompt, count, there, hit * page_size) == case["greedy_ids"]
  assert executor.recompiles == 0
  assert device_tier.buffer_pointers(executor.device_pool) == device_at
  assert executor.host_pool.unsafe_buffer_pointer() == host_at


def test_stories_one_prompt_at_every_page_size():
  config, params = stories()
  case = next(case for case in goldens() if case["name"] == "prefix_64")
  for page_size in PAGE_SIZES:
    total = driver.pages(512, page_size)
    executor = driver.make_executor(config, params, page_size, device_pages=total)
    drive = driver.Driver(executor, page_size)
    assert drive.generate(1, case["prompt_ids"], 48, np.arange(total)[::-1]) == case["greedy_ids"]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prefill_split_at_every_point_equals_one_shot(page_size):
  """Case 30."""
  config, params = stories()
  token_ids = next(c for c in goldens() if c["name"] == "fork_64")["prompt_ids"]
  total = driver.pages(128, page_size)
  executor = driver.make_executor(config, params, page_size, device_pages=total, context=128)
  drive = driver.Driver(executor, page_size)
  executor.register(1, protocol.SamplingParams(), None)
  slots = np.random.default_rng(1).permutation(total)
  count = driver.pages(len(token_ids), page_size)
  kv = lambda: device_tier.read_pages(executor.device_pool, slots[:count])
  drive.prefill(1, token_ids, slots)
  one_shot = kv()
  ids = set()
  for split in range(1, len(token_ids)):
    drive.prefill(1, token_ids[:split], slots, 0, samples=False)
    ids.add(drive.prefill(1, token_ids, slots, split).tokens[1])
    np.testing.assert_allclose(kv(), one_shot, atol=1e-3)
  assert len(ids) == 1


def test_a_decode_batch_gives_what_each_request_gives_alone():
  drive = tiny_driver()
  rng = np.random.default_rng(2)
  prompts = [rng.integers(0, 128, size).tolist() for size in (5, 1, 30)]
  slots = np.arange(48).reshape(3, 16)
  alone = [drive.generate(i, prompt, 9, slots[i]) for i, prompt in enumerate(prompts)]
  firsts = []
  for i, prompt in enumerate(prompts):
    drive.executor.register(i, protocol.SamplingParams(), None)
    firsts.append(drive.prefill(i, prompt, slots[i]).tokens[i][0])
  for steps in (1, 8):  # 8: a page boundary is crossed
    works = tuple(
      drive.decode_work(i, firsts[i], len(prompt), slots[i], steps)
      for i, prompt in enumerate(prompts)
    )
    done = drive.step(decodes=works, decode_steps=steps)[0]
    for i in range(3):
      assert [firsts[i], *done.tokens[i]] == alone[i][: steps + 1]


def test_more_decodes_than_the_largest_batch():
  drive = tiny_driver()
  alone = [drive.generate(i, [i + 1, 5], 3, [i]) for i in range(6)]
  for i in range(6):
    drive.executor.register(i, protocol.SamplingParams(), None)
    drive.prefill(i, [i + 1, 5], [i])
  works = tuple(drive.decode_work(i, alone[i][0], 2, [i]) for i in range(6))
  done = drive.step(decodes=works)[0]
  assert [done.tokens[i] for i in range(6)] == [(alone[i][1],) for i in range(6)]


def test_one_step_with_prefills_of_several_requests_and_a_decode():
  drive = tiny_driver()
  expected = [drive.generate(i, [9, 8, 7, i], 3, [i, 10]) for i in range(3)]
  for i in range(3):
    drive.executor.register(i, protocol.SamplingParams(), None)
  drive.prefill(0, [9, 8, 7, 0], [0])
  works = tuple(
    protocol.PrefillWork(
      request_id=i, token_ids=np.array([9, 8, 7, i], np.int32), start=0,
      page_table=np.array([i], np.int32), samples=i == 1,
    )
    for i in (1, 2)
  )  # fmt: skip
  decode = drive.decode_work(0, expected[0][0], 4, [0, 10])
  done = drive.step(prefills=works, decodes=(decode,))[0]
  assert done.tokens == {1: (expected[1][0],), 0: (expected[0][1],)}  # 2 was no last chunk
  assert 0 < done.started_s <= done.prefill_end_s <= done.at_s
  assert done.stall_s == 0
  assert done.compute_s == pytest.approx(done.prefill_end_s - done.started_s)


def test_draws_do_not_depend_on_the_batch():
  drive = tiny_driver()
  drawn = protocol.SamplingParams(temperature=1.5, seed=11)
  alone = drive.generate(0, [3, 4, 5], 6, [0, 1, 2], sampling=drawn)
  assert alone != drive.generate(0, [3, 4, 5], 6, [0, 1, 2])
  for i, sampling in enumerate((protocol.SamplingParams(), drawn, drawn._replace(seed=12))):
    drive.executor.register(i, sampling, None)
    drive.prefill(i, [3, 4, 5], [4 * i])
  got = [alone[0]]
  for _ in range(5):
    position = 2 + len(got)
    works = tuple(
      drive.decode_work(i, got[-1], position, [4 * i, 4 * i + 1, 4 * i + 2]) for i in range(3)
    )
    done = drive.step(decodes=works)[0]
    got.append(done.tokens[1][0])
  assert got == alone


def test_steps_in_a_row_draw_as_single_ones_whoever_is_released_meanwhile():
  """Of more requests than the largest batch has rows, greedy ones and drawn ones side by side."""
  drive = tiny_driver()
  temperatures = (1.5, 1.5, 0.0, 1.5, 1.5, 1.5)
  draws = [protocol.SamplingParams(t, seed=i % 3 - 1) for i, t in enumerate(temperatures)]
  slots = lambda i: [4 * i, 4 * i + 1, 4 * i + 2]
  expected = []
  for i, sampling in enumerate(draws):
    drive.executor.register(i, sampling, None)
    ids = [*drive.prefill(i, [3, 4, 5], slots(i)).tokens[i]]
    for position in range(3, 8):
      work = drive.decode_work(i, ids[-1], position, slots(i))
      ids += drive.step(decodes=(work,))[0].tokens[i]
    drive.executor.release(i)
    expected.append(tuple(ids))
  assert len(set(expected)) == 4  # three seeds, and the greedy one
  for i, sampling in enumerate(draws):
    drive.executor.register(i, sampling, None)
    drive.prefill(i, [3, 4, 5], slots(i))
  works = tuple(drive.decode_work(i, expected[i][0], 3, slots(i), 3) for i in range(6))
  drive.executor.launch(protocol.StepWork(step_id=0, decodes=works, decode_steps=3))
  drive.executor.release(1)
  drive.executor.release(5)
  (done,) = drive.executor.wait(None)
  assert done.tokens == {i: expected[i][1:4] for i in range(6)}
  works = tuple(drive.decode_work(i, expected[i][3], 6, slots(i), 2) for i in (4, 2, 0, 3))
  done = drive.step(decodes=works, decode_steps=2)[0]
  assert done.tokens == {i: expected[i][4:6] for i in (0, 2, 3, 4)}


@pytest.mark.parametrize(("shares", "read"), [(1, 3 * 400), (2, 350 + 2 * 50 + 400)])
def test_steps_say_how_many_tokens_they_read(monkeypatch, shares, read):
  """Two rows of three have 350 tokens in common; each has one more in the second step."""
  monkeypatch.setattr(choices, "decode_shares", lambda *args: shares)
  executor = driver.make_executor(*tiny(), 50, device_pages=32, context=450)
  drive = driver.Driver(executor, 50)
  assert executor.decode_shares == shares
  tables = np.arange(27).reshape(3, 9)
  tables[2, :7] = tables[0, :7]
  for row in range(3):
    executor.register(row, protocol.SamplingParams(), None)
  works = tuple(drive.decode_work(row, 1, 399, table, 2) for row, table in enumerate(tables))
  (done,) = drive.step(decodes=works, decode_steps=2)
  assert done.decode_read_tokens == 2 * read + 3


@pytest.mark.parametrize("layers_per_program", [(1,), (2,), (1, 2)])
def test_prefills_and_decodes_in_one_pass_are_what_they_are_apart(layers_per_program):
  """Tokens of all requests, and the KV; a prefill of more tokens goes alone."""
  config, params = tiny()
  rng = np.random.default_rng(5)
  prompts = [rng.integers(0, 256, count).tolist() for count in (21, 14, 9, 30)]
  slots = rng.permutation(40).reshape(4, 10)
  got = {}
  for joint_tokens in (0, 32):
    executor = jax_executor.JaxExecutor(
      config,
      params,
      config.page_layout(4),
      device_pages=40,
      host_pages=0,
      buckets=buckets.Buckets(
        chunk_tokens=(16, 64), decode_requests=(1, 4), transfer_pages=(8,), table_pages=10,
        prefill_rows=(1, 2), joint_tokens=joint_tokens,
      ),
      layers_per_program=layers_per_program,
    )  # fmt: skip
    executor.warmup()
    drive = driver.Driver(executor, 4)
    passes = []
    run = executor._stack.run_joint
    executor._stack.run_joint = lambda pools, batches, run=run, passes=passes: (
      passes.append([batch.token_ids.shape for batch in batches]) or run(pools, batches)
    )
    for row in range(4):
      executor.register(row, protocol.SamplingParams(temperature=0.5 * (row % 2), seed=row), None)
    first = drive.prefill(0, prompts[0], slots[0]).tokens[0]

    def prefills(*rows):
      return tuple(
        protocol.PrefillWork(
          request_id=row, token_ids=np.asarray(prompts[row], np.int32), start=0,
          page_table=slots[row][: driver.pages(len(prompts[row]), 4)], samples=True,
        )
        for row in rows
      )  # fmt: skip

    decodes = (drive.decode_work(0, first[0], 21, slots[0], 3),)
    (done,) = drive.step(prefills=prefills(1, 2), decodes=decodes, decode_steps=3)
    assert done.started_s < done.prefill_end_s < done.at_s
    assert done.joint == bool(joint_tokens)
    assert {row: len(tokens) for row, tokens in done.tokens.items()} == {0: 3, 1: 1, 2: 1}
    decodes = tuple(
      drive.decode_work(row, done.tokens[row][-1], length, slots[row])
      for row, length in ((0, 24), (1, 14), (2, 9))
    )
    (last,) = drive.step(prefills=prefills(3), decodes=decodes, decode_steps=1)
    assert not last.joint
    assert passes == ([[(2, 16), (1, 1)]] if joint_tokens else [])
    assert executor.recompiles == 0
    kv = device_tier.read_pages(executor.device_pool, slots.reshape(-1))
    got[joint_tokens] = done.tokens, last.tokens, kv
  assert got[0][:2] == got[32][:2]
  np.testing.assert_allclose(got[0][2], got[32][2], atol=1e-5)


def test_near_ties_are_reported():
  config, params = tiny()
  same = params.head.output.at[1].set(params.head.output[0])  # tokens 0 and 1 tie always
  up = same[0] * 1000
  params = params.replace(head=params.head.replace(output=same.at[0].set(up).at[1].set(up)))
  executor = driver.make_executor(config, params, 4, device_pages=16, context=64)
  drive = driver.Driver(executor, 4)
  seen = {}
  for token in range(2, 12):
    executor.register(0, protocol.SamplingParams(), None)
    done = drive.prefill(0, [token], [3])
    seen[done.tokens[0][0]] = done.near_ties
  assert seen[0] == {0: (0,)}  # the tie, the lower id wins
  assert 1 not in seen
  assert any(not ties for ties in seen.values())


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_bytes_survive_backup_and_load(page_size):
  """Case 23, through the executor's pools; KV of a real prefill."""
  drive = tiny_driver(page_size, device_pages=128 // page_size * 2 + 5, host_pages=140)
  executor, count = drive.executor, 128 // page_size
  rng = np.random.default_rng(4)
  slots = rng.permutation(2 * count + 5)
  source, target, kept = slots[:count], slots[count : 2 * count], rng.permutation(140)[:count]
  executor.register(0, protocol.SamplingParams(), None)
  drive.prefill(0, rng.integers(0, 128, 128).tolist(), source)
  everything = np.arange(2 * count + 5)
  before = device_tier.read_pages(executor.device_pool, everything)
  assert np.abs(before[source]).min(axis=(2, 3, 4, 5)).max() > 0
  drive.backup(source, kept)
  np.testing.assert_array_equal(host_tier.read_pages(executor.host_pool, kept), before[source])
  drive.load(kept, target)
  after = device_tier.read_pages(executor.device_pool, everything)
  np.testing.assert_array_equal(after[target], before[source])
  others = np.setdiff1d(everything, target)
  np.testing.assert_array_equal(after[others], before[others])


def test_backups_of_a_step_read_before_its_loads_and_prefills_write():
  drive = tiny_driver()
  executor = drive.executor
  executor.register(0, protocol.SamplingParams(), None)
  drive.prefill(0, list(range(16)), [0, 1, 2, 3])
  old = device_tier.read_pages(executor.device_pool, [0, 1, 2, 3])
  drive.backup([2, 3], [8, 9])
  backup = protocol.BackupWork(
    transfer_id=1, node_ids=(), device_slots=np.array([0, 1]), host_slots=np.array([4, 5]),
    tokens=8, evicts=True,
  )  # fmt: skip
  prefill = protocol.PrefillWork(
    request_id=0, token_ids=np.arange(20, 28, dtype=np.int32), start=4,
    page_table=np.array([0, 1, 5], np.int32), samples=True, waits_for=(2,),
  )  # fmt: skip
  load = drive.load_work([8], [0], transfer_id=2)
  events = drive.step(3, backups=(backup,), loads=(load,), prefills=(prefill,))
  assert [type(event) for event in events] == [
    protocol.BackupDone, protocol.LoadDone, protocol.StepDone,
  ]  # fmt: skip
  done = events[-1]
  assert done.stall_s == pytest.approx(events[1].at_s - done.started_s)
  assert done.stall_s + done.compute_s == pytest.approx(done.prefill_end_s - done.started_s)
  np.testing.assert_array_equal(host_tier.read_pages(executor.host_pool, [4, 5]), old[:2])
  new = device_tier.read_pages(executor.device_pool, [0, 1])
  np.testing.assert_array_equal(new[0], old[2])  # loaded
  assert (new[1] != old[1]).any()  # computed
  # What the prefill saw is the loaded page, not the old one.
  np.testing.assert_allclose(
    new[1], behind(drive, old[2:3], list(range(20, 24))), rtol=1e-5, atol=1e-5
  )


def behind(drive, context, token_ids):
  """The first page of KV of tokens computed behind one page of context, in fresh slots."""
  executor = drive.executor
  host = np.array(host_tier.read_pages(executor.host_pool, np.arange(32)))
  at = int(np.flatnonzero((host == context).all(axis=(1, 2, 3, 4, 5)))[0])
  drive.load([at], [20])
  drive.prefill(0, [0, 0, 0, 0, *token_ids], [20, 21], start=4)
  return device_tier.read_pages(executor.device_pool, [21])[0]


def test_a_step_of_transfers_alone_has_no_step_done():
  drive = tiny_driver()
  assert isinstance(drive.load([0], [0]), protocol.LoadDone)
  work = drive.load_work([1], [1], transfer_id=5)
  (event,) = drive.step(loads=(work,), parked_loads=(5,))
  assert event.transfer_id == 5
  with pytest.raises(RuntimeError, match="nothing is under way"):
    drive.executor.wait(None)


def test_two_steps_of_backups_are_both_reported():
  executor = tiny_driver().executor
  for transfer_id in (1, 2):
    backup = protocol.BackupWork(
      transfer_id=transfer_id, node_ids=(), device_slots=np.array([0]),
      host_slots=np.array([transfer_id]), tokens=4,
    )  # fmt: skip
    executor.launch(protocol.StepWork(step_id=transfer_id, backups=(backup,)))
  events = []
  while len(events) < 2:
    events += executor.wait(None)
  assert [event.transfer_id for event in events] == [1, 2]
  assert all(event.ok for event in events)


def test_wait_until_a_time():
  executor = tiny_driver().executor
  until_s = executor.now_s() + 0.05
  assert executor.wait(until_s) == []
  assert until_s <= executor.now_s() < until_s + 1
  started = time.perf_counter()
  assert executor.wait(executor.now_s() - 1) == []
  assert time.perf_counter() - started < 0.5


def test_wait_reports_work_that_is_done_before_the_time():
  drive = tiny_driver()
  drive.load([0], [0])
  drive.executor.launch(protocol.StepWork(step_id=9, loads=(drive.load_work([0], [1]),)))
  (event,) = drive.executor.wait(drive.executor.now_s() + 60)
  assert event.at_s < 60


@pytest.mark.slow
def test_nothing_compiles_after_the_warm_up_and_the_counter_would_see_it():
  drive = tiny_driver(page_size=2, device_pages=66)  # a shape that no other test compiles
  executor = drive.executor
  seen = []
  executor.warmup(lambda done, total, what: seen.append((done, total, what)))
  assert seen[0][0] == 0
  assert seen[-1][0] == seen[-1][1]
  assert 0 < executor.warmup_compilations <= executor.buckets.programs + 8
  before = device_tier.read_pages(executor.device_pool, np.arange(66))
  assert not before.any()  # the warm-up writes nothing
  drive.generate(0, list(range(90)), 9, np.arange(60))
  drive.backup(np.arange(13), np.arange(13))
  drive.load(np.arange(13), np.arange(13))
  assert executor.recompiles == 0
  wide = protocol.PrefillWork(
    request_id=1, token_ids=np.zeros(3, np.int32), start=0,
    page_table=np.array([1, 2], np.int32), samples=False,
  )  # fmt: skip
  executor._inputs.buckets = buckets.Buckets(
    chunk_tokens=(17,), decode_requests=(1,), transfer_pages=(8,), table_pages=64
  )
  drive.step(prefills=(wide,))
  assert executor.recompiles > 0


def test_errors():
  config, params = tiny()
  other = config_lib.MODELS["smollm2_135m"].page_layout(4)
  with pytest.raises(ValueError, match="page layout: expected"):
    jax_executor.JaxExecutor(
      config, params, other, device_pages=4, host_pages=0, buckets=tiny_driver().executor.buckets
    )
  drive = tiny_driver(host_pages=0)
  with pytest.raises(ValueError, match="there is no host tier"):
    drive.load([0], [0])
  drive.executor.register(0, protocol.SamplingParams(), None)
  with pytest.raises(ValueError, match="in at most 32 pages, got 33 pages of 4"):
    drive.prefill(0, [0] * 132, np.arange(33))
  work = drive.decode_work(0, 1, 7, [1, 2])  # two steps would need a third page
  with pytest.raises(ValueError, match=r"expected room for 9 tokens .* got 2 pages of 4"):
    drive.step(decodes=(work,), decode_steps=2)
  with pytest.raises(ValueError, match="expected tokens, got none"):
    drive.prefill(0, [], [])
  with pytest.raises(ValueError, match="attention: expected one of"):
    tiny_driver(attention="flash")
