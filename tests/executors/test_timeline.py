import numpy as np
import pytest

from strata_jax import profile as profiles
from strata_jax.cost_model import CostModel, IoConfig
from strata_jax.executors.protocol import BackupWork, LoadWork, PrefillWork, StepWork
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
  work = StepWork(step_id=4, loads=(load(1, 10),), prefills=(prefill(5),))
  assert line.start(work, 0.0) == ({1: 1.5}, 1.0, 2.0, 0.5, 0.5)
  assert line.decode_end_s(4, 2.0, 1, 1) == 3.0
  with pytest.raises(KeyError):
    line.start(StepWork(step_id=5, prefills=(prefill(5),)), 0.0)
