import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from strata_jax import profile as profiles
from strata_jax.cost_model import CostModel, IoConfig
from strata_jax.executors.buckets import Buckets
from strata_jax.executors.protocol import (
  DecodeWork,
  LoadDone,
  LoadWork,
  PrefillWork,
  SamplingParams,
  StepDone,
  StepWork,
)
from strata_jax.executors.simulated import SimulatedExecutor
from strata_jax.executors.timeline import CostTimeline

PROFILE = profiles.load("h200_llama31_8b")


def executor(outputs, **options):
  """One with requests 0 .. n - 1 of the given output lengths."""
  simulated = SimulatedExecutor(CostTimeline(CostModel(PROFILE, IoConfig())), **options)
  for request_id, count in enumerate(outputs):
    ids = 1000 * (request_id + 1) + np.arange(count, dtype=np.int32)
    simulated.register(request_id, SamplingParams(), ids)
  return simulated


def decode(step_id, positions, steps=1, loads=(), parked=()):
  return StepWork(
    step_id=step_id,
    decodes=tuple(
      DecodeWork(request_id=i, token_id=0, position=p, page_table=np.arange(p + steps))
      for i, p in enumerate(positions)
    ),
    decode_steps=steps, loads=loads, parked_loads=parked,
  )  # fmt: skip


def prefill(step_id, tokens, samples=True):
  chunk = PrefillWork(
    request_id=0, token_ids=np.arange(tokens, dtype=np.int32), start=0,
    page_table=np.arange(tokens, dtype=np.int32), samples=samples,
  )  # fmt: skip
  return StepWork(step_id=step_id, prefills=(chunk,))


def load(transfer_id, tokens):
  slots = np.arange(tokens, dtype=np.int32)
  return LoadWork(
    transfer_id=transfer_id, request_id=0, node_ids=(1,), host_slots=slots, device_slots=slots,
    tokens=tokens,
  )  # fmt: skip


def test_a_last_chunk_gives_the_first_output_and_decodes_the_next():
  simulated = executor([3])
  simulated.launch(prefill(0, 100, samples=False))
  assert simulated.wait(None)[0].tokens == {}
  simulated.launch(prefill(1, 100))
  (done,) = simulated.wait(None)
  assert done.tokens == {0: (1000,)}
  assert done.prefill_end_s == done.at_s == simulated.now_s()
  simulated.launch(decode(2, [100], steps=5))
  (done,) = simulated.wait(None)
  assert done.tokens == {0: (1001, 1002)}  # the forced output ends here, and the step with it


def test_wait_stops_at_the_time_asked_for():
  simulated = executor([3])
  simulated.launch(prefill(0, 5000))
  assert simulated.wait(0.001) == []
  assert simulated.now_s() == 0.001
  assert simulated.wait(0.0005) == []  # time does not run backwards
  assert simulated.now_s() == 0.001
  assert isinstance(simulated.wait(None)[0], StepDone)
  assert simulated.wait(9.0) == []
  assert simulated.now_s() == 9.0


def test_misuse_is_refused():
  simulated = executor([3])
  with pytest.raises(RuntimeError, match="got neither"):
    simulated.wait(None)
  with pytest.raises(ValueError, match="expected forced_output_ids"):
    simulated.register(9, SamplingParams(), None)
  simulated.launch(prefill(0, 10))
  with pytest.raises(RuntimeError, match="still under way"):
    simulated.launch(prefill(1, 10))


def test_loads_without_compute_come_back_on_their_own():
  simulated = executor([3])
  simulated.launch(StepWork(step_id=0, loads=(load(5, 1000),), parked_loads=(5,)))
  (event,) = simulated.wait(None)
  assert event == LoadDone(5, simulated.now_s())
  assert event.at_s == pytest.approx(1000 * 131072 / 50.6e9, rel=0.2)


def test_decode_steps_stop_at_the_first_boundary_after_a_load_or_an_arrival():
  step_s = CostModel(PROFILE, IoConfig()).decode_step_s(1, 1001)
  simulated = executor([1000])
  simulated.launch(decode(0, [1000], steps=500, loads=(load(1, 2000),), parked=(1,)))
  (loaded,) = simulated.wait(None)
  assert loaded.transfer_id == 1
  (done,) = simulated.wait(None)
  assert loaded.at_s <= done.at_s < loaded.at_s + 1.2 * step_s
  simulated.launch(decode(1, [1000], steps=500))
  arrival_s = simulated.now_s() + 10.5 * step_s
  assert simulated.wait(arrival_s) == []
  (done,) = simulated.wait(None)
  assert len(done.tokens[0]) == 11


def test_decode_steps_read_what_rows_share_once_and_take_as_long_as_that():
  costs = CostModel(PROFILE, IoConfig(page_size=16))
  shared, lengths = np.arange(100, dtype=np.int32), (1700, 1650)
  tables = [np.concatenate([shared, 1000 * (i + 1) + np.arange(20, dtype=np.int32)])
            for i in range(2)]  # fmt: skip
  work = StepWork(
    step_id=0, decode_steps=3,
    decodes=tuple(
      DecodeWork(request_id=i, token_id=0, position=position, page_table=table)
      for i, (position, table) in enumerate(zip(lengths, tables, strict=True))
    ),
  )  # fmt: skip
  for shares, saved in ((1, 0), (2, 1600)):
    simulated = SimulatedExecutor(CostTimeline(costs), decode_shares=shares, page_size=16)
    for request_id in range(2):
      simulated.register(request_id, SamplingParams(), np.arange(3, dtype=np.int32))
    simulated.launch(work)
    (done,) = simulated.wait(None)
    read = [sum(lengths) + 2 * step - saved for step in (1, 2, 3)]
    assert done.decode_read_tokens == sum(read)
    assert done.at_s == pytest.approx(sum(costs.decode_step_s(2, tokens) for tokens in read))


@hypothesis.given(
  positions=st.lists(st.integers(1, 20_000), min_size=1, max_size=5),
  outputs=st.lists(st.integers(1, 60), min_size=5, max_size=5),
  loaded=st.integers(0, 5000),
  arrivals=st.lists(st.floats(0.0, 0.5), max_size=4),
  fast=st.integers(2, 64),
  shares=st.integers(1, 2),
)
def test_several_decode_steps_equal_single_ones_exactly(
  positions, outputs, loaded, arrivals, fast, shares
):
  """Drives both as a serving loop would while nothing waits: bit-equal times and tokens."""

  def run(steps):
    simulated = executor(outputs[: len(positions)], decode_shares=shares)
    if loaded:
      simulated.launch(StepWork(step_id=0, loads=(load(1, loaded),), parked_loads=(1,)))
    timers = sorted(arrivals)
    now = list(positions)
    tables = [np.arange(20_100) + (np.arange(20_100) >= 300 * i) for i in range(len(positions))]
    given = {i: [] for i in range(len(positions))}
    log = []
    step_id = 1
    while True:
      live = [i for i in range(len(positions)) if len(given[i]) < outputs[i]]
      if not live:
        return log, given, simulated.now_s()
      simulated.launch(
        StepWork(
          step_id=step_id, decode_steps=steps,
          decodes=tuple(
            DecodeWork(request_id=i, token_id=0, position=now[i], page_table=tables[i])
            for i in live
          ),
        )
      )  # fmt: skip
      step_id += 1
      while True:
        timers = [at_s for at_s in timers if at_s > simulated.now_s()]
        events = simulated.wait(timers[0] if timers else None)
        log += [(type(e).__name__, e.at_s) for e in events if isinstance(e, LoadDone)]
        done = [e for e in events if isinstance(e, StepDone)]
        if not events:
          log.append(("arrival", simulated.now_s()))
        if done:
          break
      for i, tokens in done[0].tokens.items():
        given[i] += tokens
        now[i] += len(tokens)
      over = [i for i in live if len(given[i]) == outputs[i]]
      if over:
        log.append(("over", simulated.now_s(), over))

  assert run(1) == run(fast)


BUCKETS = Buckets(
  chunk_tokens=(32,), decode_requests=(8,), transfer_pages=(64,), table_pages=900, joint_tokens=32
)


def joint_executor(outputs, **options):
  """Its requests come after request 0, which the prefills are of."""
  costs = CostModel(PROFILE, IoConfig(), BUCKETS)
  simulated = SimulatedExecutor(CostTimeline(costs), **options)
  for request_id, count in enumerate(outputs):
    simulated.register(request_id, SamplingParams(), np.arange(count, dtype=np.int32))
  return simulated, costs


def joint_step(steps):
  decodes = tuple(
    DecodeWork(request_id=1 + i, token_id=0, position=100, page_table=np.arange(110))
    for i in range(2)
  )
  work = prefill(0, 20)
  return dataclasses.replace(work, decodes=decodes, decode_steps=steps)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_joint_pass_is_the_first_decode_step(steps):
  simulated, costs = joint_executor([1, 9, 9])
  simulated.launch(joint_step(steps))
  (done,) = simulated.wait(None)
  assert done.joint
  assert [len(done.tokens[i]) for i in range(3)] == [1, steps, steps]
  assert done.decode_read_tokens == sum(2 * (101 + step) for step in range(steps))
  first_s = costs.joint_s([(20, 0)], 2, 202)
  assert done.prefill_end_s == pytest.approx(first_s - costs.head_s(2))
  later_s = sum(costs.decode_step_s(2, 2 * (101 + step)) for step in range(1, steps))
  assert done.at_s == pytest.approx(first_s + later_s)


@pytest.mark.parametrize("whole", [False, True])
def test_an_arrival_during_a_joint_pass_ends_the_step_with_it(whole):
  simulated, costs = joint_executor([1, 9, 9], whole_decodes=whole)
  simulated.launch(joint_step(5))
  assert simulated.wait(1e-3) == []
  (done,) = simulated.wait(None)
  assert len(done.tokens[1]) == (5 if whole else 1)
  if not whole:
    assert done.at_s == pytest.approx(costs.joint_s([(20, 0)], 2, 202))


def test_a_step_that_is_not_joint_says_so():
  simulated, _ = joint_executor([1])
  simulated.launch(prefill(0, 20))
  (done,) = simulated.wait(None)
  assert not done.joint
