import dataclasses

import numpy as np
import pytest

from strata_jax import profile as profiles
from strata_jax.cost_model import CostModel, IoConfig
from strata_jax.executors.buckets import Buckets
from strata_jax.executors.protocol import BackupWork, DecodeWork, LoadWork, PrefillWork, StepWork
from strata_jax.executors.timeline import CostTimeline, RecordedStep, RecordedTimeline

PROFILE = profiles.load("h200_llama31_8b")
LAYERS = PROFILE.model.num_layers


def timeline(**io):
  return CostTimeline(CostModel(PROFILE, IoConfig(**io)))


def slots(pages):
  return np.arange(pages, dtype=np.int32)


def load(transfer_id, tokens):
  return LoadWork(
    transfer_id=transfer_id, request_id=0, node_ids=(1,), host_slots=slots(tokens),
    device_slots=slots(tokens), tokens=tokens,
  )  # fmt: skip


def backup(transfer_id, tokens, evicts=False):
  return BackupWork(
    transfer_id=transfer_id, node_ids=(1,), device_slots=slots(tokens), host_slots=slots(tokens),
    tokens=tokens, evicts=evicts,
  )  # fmt: skip


def prefill(tokens, start=0, waits_for=(), samples=True):
  return PrefillWork(
    request_id=0, token_ids=slots(tokens), start=start, page_table=slots(start + tokens),
    samples=samples, waits_for=waits_for,
  )  # fmt: skip


def test_a_prefill_without_loads_costs_what_the_model_says():
  line = timeline()
  times = line.start(StepWork(step_id=0, prefills=(prefill(500, 1000),)), 7.0)
  seconds = line.costs.prefill_s([(500, 1000)])
  assert times.started_s == 7.0
  assert times.prefill_end_s == pytest.approx(7.0 + seconds)
  assert times.compute_s == pytest.approx(seconds)
  assert times.stall_s == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("tokens", [10, 300, 6000])
def test_layers_wait_for_their_own_loads(tokens):
  # Copies by the engine: the interference is undone by hand so that the closed form is exact.
  line = timeline(load_backend="copy_engine")
  line.costs.interference = type(line.costs.interference)(prefill=0.0, decode=0.0)
  work = StepWork(step_id=0, loads=(load(1, 20_000),), prefills=(prefill(tokens, 20_000, (1,)),))
  times = line.start(work, 0.0)
  load_s = line.costs.load_s(20_000)
  layer_s = line.costs.prefill_layer_s([(tokens, 20_000)]) + PROFILE.hardware.gate_s
  tail_s = line.costs.prefill_tail_s(1)
  # Compute-bound: the first layer's load, then all compute. Load-bound: all loads, then a layer.
  expected = max(load_s / LAYERS + LAYERS * layer_s, load_s + layer_s) + tail_s
  assert times.prefill_end_s == pytest.approx(expected)
  assert times.compute_s == pytest.approx(LAYERS * layer_s + tail_s)
  assert times.stall_s == pytest.approx(expected - times.compute_s)
  assert times.transfers == {1: load_s}


def test_overlap_layer_beats_whole_and_none_also_waits_for_parked_loads():
  ends = {}
  for overlap in ("layer", "whole", "none"):
    line = timeline(overlap=overlap)
    work = StepWork(
      step_id=0, loads=(load(1, 8000), load(2, 8000)), parked_loads=(2,),
      prefills=(prefill(2000, 8000, (1,)),),
    )  # fmt: skip
    ends[overlap] = line.start(work, 0.0).prefill_end_s
  load_s = timeline().costs.load_s(8000)
  assert ends["layer"] < ends["whole"] < ends["none"]
  assert ends["none"] - ends["whole"] == pytest.approx(load_s, rel=0.1)


def test_a_step_waits_for_loads_of_an_earlier_launch_and_for_nothing_after_they_are_done():
  line = timeline()
  line.start(StepWork(step_id=0, loads=(load(1, 20_000),), parked_loads=(1,)), 0.0)
  load_s = line.costs.load_s(20_000)
  waiting = StepWork(step_id=1, prefills=(prefill(10, 20_000, (1,)),))
  times = line.start(waiting, load_s / 2)
  assert times.prefill_end_s > load_s
  line.forget(1)
  later = line.start(waiting, 10.0)
  assert later.stall_s == pytest.approx(0.0, abs=1e-12)


def test_transfers_of_one_direction_queue_and_directions_do_not():
  line = timeline()
  seconds, up_s = line.costs.load_s(1000), line.costs.backup_s(1000)
  first = line.start(StepWork(step_id=0, loads=(load(1, 1000),), backups=(backup(2, 1000),)), 0.0)
  second = line.start(StepWork(step_id=1, loads=(load(3, 1000),)), 0.0)
  assert first.transfers == {1: seconds, 2: up_s}
  assert second.transfers[3] == pytest.approx(2 * seconds)
  assert line.down.busy_s == pytest.approx(2 * seconds)
  assert line.down.bytes_moved == 2000 * 131072


IN_TURN = [
  {"load_backend": "auto", "page_size": 32},  # fragments of 128 KiB
  {"load_backend": "auto", "page_size": 1, "overlap": "whole"},
  {"load_backend": "kernel", "overlap": "whole"},
  {"load_backend": "memcpy_async"},
  {"load_backend": "copy_engine"},
]


@pytest.mark.parametrize("io", IN_TURN, ids=str)
def test_parked_loads_end_one_after_the_other_in_the_time_of_one(io):
  line = timeline(**io)
  pages = {1: 1000, 2: 200, 3: 500}
  loads = tuple(load(transfer_id, count) for transfer_id, count in pages.items())
  times = line.start(StepWork(step_id=0, loads=loads, parked_loads=(1, 2, 3)), 2.0)
  assert times.transfers == pytest.approx({
    1: 2.0 + line.costs.load_s(1000), 2: 2.0 + line.costs.load_s(1200),
    3: 2.0 + line.costs.load_s(1700),
  })  # fmt: skip
  assert times.transfers[3] == line.down.free_at_s
  assert line.down.busy_s == pytest.approx(line.costs.load_s(1700))
  starts = [line._loads[transfer_id].start_s for transfer_id in pages]
  assert starts == [2.0, times.transfers[1], times.transfers[2]]


@pytest.mark.parametrize("backend", ["kernel", "auto"])
def test_parked_loads_of_a_kernel_layer_by_layer_end_together(backend):
  line = timeline(load_backend=backend, page_size=1)
  loads = (load(1, 1000), load(2, 200))
  times = line.start(StepWork(step_id=0, loads=loads, parked_loads=(1, 2)), 0.0)
  assert times.transfers == {1: line.costs.load_s(1200), 2: line.costs.load_s(1200)}
  assert {line._loads[1].start_s, line._loads[2].start_s} == {0.0}


def test_loads_that_are_not_parked_end_together_and_the_parked_come_behind_them():
  line = timeline(load_backend="copy_engine")
  loads = (load(1, 300), load(2, 1000), load(3, 100), load(4, 50))
  times = line.start(StepWork(step_id=0, loads=loads, parked_loads=(1, 4)), 0.0)
  own_s = line.costs.load_s(1100)
  assert times.transfers == pytest.approx({
    1: own_s + line.costs.load_s(300), 2: own_s, 3: own_s, 4: own_s + line.costs.load_s(350),
  })  # fmt: skip
  later = line.start(StepWork(step_id=1, loads=(load(5, 10),), parked_loads=(5,)), 0.0)
  assert line._loads[5].start_s == times.transfers[4]
  assert later.transfers[5] == pytest.approx(times.transfers[4] + line.costs.load_s(10))


def test_a_prefill_waits_for_the_parked_load_that_it_reads_and_for_none_behind_it():
  line = timeline(load_backend="copy_engine", overlap="whole")
  work = StepWork(step_id=0, loads=(load(1, 20_000), load(2, 20_000)), parked_loads=(1, 2))
  came = line.start(work, 0.0).transfers
  for transfer_id in (1, 2):
    times = line.start(StepWork(step_id=1, prefills=(prefill(10, 20_000, (transfer_id,)),)), 0.0)
    assert times.stall_s == pytest.approx(came[transfer_id])


def test_parked_loads_that_are_free_take_no_turns():
  line = timeline(load_is_free=True, load_backend="copy_engine")
  work = StepWork(step_id=0, loads=(load(1, 20), load(2, 30)), parked_loads=(1, 2))
  assert line.start(work, 1.0).transfers == {1: 1.0, 2: 1.0}


def test_evicting_backups_go_before_everything_that_writes():
  line = timeline()
  up_s = line.costs.backup_s(1000)
  work = StepWork(
    step_id=0, loads=(load(1, 100),), backups=(backup(2, 1000, evicts=True),),
    prefills=(prefill(10, 100, (1,)),),
  )  # fmt: skip
  times = line.start(work, 0.0)
  assert times.started_s == up_s
  assert times.transfers[1] == pytest.approx(up_s + line.costs.load_s(100))


def test_a_load_slows_compute_beside_it_by_the_profiles_share():
  line = timeline()
  line.start(StepWork(step_id=0, loads=(load(1, 200_000),), parked_loads=(1,)), 0.0)
  alone = line.costs.decode_step_s(8, 80_000)
  assert line.decode_end_s(1, 0.0, 8, 80_000) == pytest.approx(alone * 1.10)
  prefilled = line.start(StepWork(step_id=2, prefills=(prefill(100),)), 0.0)
  assert prefilled.compute_s == pytest.approx(line.costs.prefill_s([(100, 0)]) * 1.05)
  # A load that ends halfway slows the first half only.
  line.down.free_at_s = 1.05
  assert line._advance(0.0, 2.0, 0.05) == pytest.approx(2.05)


def test_free_loads_are_done_at_once():
  line = timeline(load_is_free=True)
  work = StepWork(step_id=0, loads=(load(1, 20_000),), prefills=(prefill(10, 20_000, (1,)),))
  times = line.start(work, 1.0)
  assert times.transfers == {1: 1.0}
  assert times.stall_s == pytest.approx(0.0, abs=1e-12)


def test_a_record_gives_its_times_back_and_refuses_others():
  line = RecordedTimeline(
    {4: RecordedStep(started_s=1.0, prefill_end_s=2.0, at_s=3.0, compute_s=0.5, stall_s=0.5)},
    {1: 1.5},
  )
  work = StepWork(step_id=4, loads=(load(1, 10),), prefills=(prefill(5),), decodes=DECODES)
  assert line.start(work, 0.0) == ({1: 1.5}, 1.0, 2.0, 0.5, 0.5, None)
  assert line.decode_end_s(4, 2.0, 1, 1) == 3.0
  # Without decodes nothing but the end of its prefills ends the step.
  alone = dataclasses.replace(work, decodes=())
  assert line.start(alone, 0.0) == ({1: 1.5}, 1.0, 3.0, 0.5, 0.5, None)
  with pytest.raises(KeyError):
    line.start(StepWork(step_id=5, prefills=(prefill(5),)), 0.0)


# Prefills in one pass with the first decode step

BUCKETS = Buckets(
  chunk_tokens=(32, 128), decode_requests=(8,), transfer_pages=(64,), table_pages=900,
  prefill_rows=(1, 4), joint_tokens=128,
)  # fmt: skip
DECODES = tuple(
  DecodeWork(request_id=1 + i, token_id=0, position=9, page_table=slots(10)) for i in range(4)
)
READ = 40


def joint_timeline(executor=PROFILE.executor, **io):
  machine = dataclasses.replace(PROFILE, executor=executor)
  return CostTimeline(CostModel(machine, IoConfig(**io), BUCKETS))


def mixed(*chunks, decodes=DECODES, **fields):
  return StepWork(step_id=0, prefills=chunks, decodes=decodes, **fields)


def test_a_joint_pass_costs_what_the_model_says():
  line = joint_timeline()
  times = line.start(mixed(prefill(20, 1000), prefill(30)), 7.0, READ)
  costs, chunks = line.costs, [(20, 1000), (30, 0)]
  assert times.first_decode_end_s == pytest.approx(7.0 + costs.joint_s(chunks, 4, READ))
  head_s = costs.head_s(4)
  assert times.first_decode_end_s - times.prefill_end_s == pytest.approx(head_s)
  assert times.compute_s == pytest.approx(costs.joint_s(chunks, 4, READ) - head_s)
  assert line.compute_busy_s == pytest.approx(costs.joint_s(chunks, 4, READ))
  assert times.stall_s == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
  ("work", "joint"),
  [
    (mixed(prefill(20)), True),
    (mixed(prefill(20), decodes=()), False),
    (mixed(prefill(128)), True),
    (mixed(prefill(129)), False),  # two batches
    (mixed(prefill(20), prefill(100)), False),  # of different shapes
    (mixed(*(prefill(20) for _ in range(4))), True),
    (mixed(*(prefill(20) for _ in range(5))), False),
    (mixed(prefill(20), loads=(load(1, 500),), parked_loads=(1,)), True),
    (mixed(prefill(20, 500, (1,)), loads=(load(1, 500),)), False),
    (mixed(prefill(20), loads=(load(1, 500), load(2, 500)), parked_loads=(1,)), False),
  ],
)
def test_which_steps_are_joint(work, joint):
  line = joint_timeline()
  times = line.start(work, 0.0, READ)
  assert (times.first_decode_end_s is not None) == joint
  apart = CostTimeline(
    CostModel(PROFILE, IoConfig(), dataclasses.replace(BUCKETS, joint_tokens=0))
  ).start(work, 0.0, READ)
  assert apart.first_decode_end_s is None
  if not joint:
    assert times == apart


def test_a_prefill_that_waits_for_an_earlier_load_is_in_no_joint_pass():
  line = joint_timeline()
  line.start(StepWork(step_id=1, loads=(load(1, 20_000),), parked_loads=(1,)), 0.0)
  waiting = mixed(prefill(20, 20_000, (1,)))
  assert line.start(waiting, 0.0, READ).first_decode_end_s is None
  line.forget(1)
  assert line.start(waiting, 1.0, READ).first_decode_end_s is not None


def test_whole_and_free_loads_do_not_ride_with_the_compute():
  work = mixed(prefill(20, 8000, (1,)), loads=(load(1, 8000),))
  for overlap in ("whole", "none"):
    line = joint_timeline(overlap=overlap)
    times = line.start(work, 0.0, READ)
    assert times.first_decode_end_s is not None
    least_s = line.costs.load_s(8000) + line.costs.joint_s([(20, 8000)], 4, READ)
    assert times.first_decode_end_s >= least_s * (1 - 1e-12)
  assert joint_timeline(load_is_free=True).start(work, 0.0, READ).first_decode_end_s is not None


def test_parked_loads_ride_where_loads_hold_compute():
  executor = dataclasses.replace(PROFILE.executor, loads_hold_compute=1.0)
  work = mixed(prefill(20), loads=(load(1, 500),), parked_loads=(1,))
  assert joint_timeline(executor).start(work, 0.0, READ).first_decode_end_s is None


def test_loads_beside_a_joint_pass_slow_it_like_a_prefill():
  line = joint_timeline()
  work = mixed(prefill(20), loads=(load(1, 200_000),), parked_loads=(1,))
  alone_s = line.costs.joint_s([(20, 0)], 4, READ)
  assert line.start(work, 0.0, READ).first_decode_end_s == pytest.approx(alone_s * 1.05)
