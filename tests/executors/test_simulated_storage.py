"""The simulated page store: what it has, when, and how long everything takes."""

import dataclasses

import numpy as np
import pytest

from strata_jax import simulation, systems
from strata_jax.executors.protocol import LookUpWork, PrefetchWork, SpillWork
from strata_jax.executors.simulated import SimulatedExecutor
from strata_jax.executors.simulated_storage import SimulatedStorage
from strata_jax.executors.timeline import InstantTimeline
from strata_jax.page_keys import root_key
from strata_jax.profile import Storage
from strata_jax.workloads import synthetic

PAGE_SIZE, PAGE_BYTES = 4, 100.0
COSTS = Storage(read_bytes_per_s=1000.0, write_bytes_per_s=500.0, latency_s=0.5)
ROOT = root_key("model")


def make(**options) -> SimulatedStorage:
  return SimulatedStorage(COSTS, page_bytes=PAGE_BYTES, page_size=PAGE_SIZE, **options)


def tokens(pages: int, first: int = 1) -> np.ndarray:
  return np.arange(first, first + pages * PAGE_SIZE, dtype=np.int32)


def look_up(pages: int, *, skip: int = 0, first: int = 1) -> LookUpWork:
  return LookUpWork(
    work_id=0, request_id=0, parent_key=ROOT, token_ids=tokens(pages, first), skip_pages=skip
  )


def spill(pages: int, first: int = 1) -> SpillWork:
  return SpillWork(
    work_id=1, parent_key=ROOT, token_ids=tokens(pages, first), skip_pages=0,
    host_slots=np.arange(pages, dtype=np.int32),
  )  # fmt: skip


def test_pages_are_found_once_they_are_durable():
  storage = make()
  handed, done = storage.start(spill(5), 0.0)
  assert (handed.at_s, done.at_s) == (1.0, 1.5)
  assert storage.start(look_up(8), 1.4)[0].pages == 0
  (event,) = storage.start(look_up(8), 1.5)
  assert (event.pages, event.at_s) == (5, 2.0)
  assert storage.start(look_up(8, skip=2), 1.5)[0].pages == 3
  assert storage.start(look_up(8, first=9), 1.5)[0].pages == 0


def test_reads_queue_behind_reads_and_writes_behind_writes():
  storage = make()
  storage.start(spill(10), 0.0)
  assert storage.start(spill(10, first=900), 0.0)[0].at_s == 4.0
  asked = look_up(10)
  storage.start(asked, 10.0)
  slots = np.arange(5, dtype=np.int32)
  first, second = (
    storage.start(PrefetchWork(work_id=i, look_up=asked, first_page=5 * i, host_slots=slots), 10.0)
    for i in range(2)
  )
  assert (first[0].at_s, second[0].at_s) == (11.0, 11.5)
  assert (first[0].pages, second[0].pages) == (5, 5)
  assert storage.read_bytes == 1000.0


def test_pages_that_are_there_are_not_written_again():
  storage = make()
  storage.start(spill(10), 0.0)
  handed, done = storage.start(spill(10), 100.0)
  assert (handed.at_s, done.at_s) == (100.0, 100.5)
  assert storage.written_bytes == 1000.0


def test_capacity():
  storage = make(capacity_pages=6)
  storage.start(spill(4), 0.0)
  storage.start(spill(4, first=900), 0.0)
  assert len(storage) == 6
  assert storage.start(look_up(4, first=900), 100.0)[0].pages == 4


def test_what_it_remembers_of_look_ups_is_bounded():
  """Reads of look-ups made long ago still find their pages."""
  storage = make()
  storage.start(spill(3), 0.0)
  first = look_up(3)
  storage.start(first, 10.0)
  for i in range(1000):
    storage.start(look_up(1, first=1000 + i), 10.0)
  assert len(storage._keys) <= 256
  read = PrefetchWork(work_id=1, look_up=first, first_page=1, host_slots=np.arange(2))
  assert storage.start(read, 10.0)[0].pages == 2
  assert len(storage._keys) <= 256


def test_an_executor_without_storage_refuses_its_work():
  with pytest.raises(ValueError, match="there is none"):
    SimulatedExecutor(InstantTimeline()).launch_storage(look_up(1))


@pytest.mark.parametrize("prefetch", ["best_effort", "wait_complete", "timeout", "cost"])
def test_a_simulated_run_reads_what_host_memory_lost(prefetch):
  machine = simulation.find_profile("h200", "llama31_8b")
  system = simulation.system_with(
    systems.system("strata"),
    {"page_size": 64, "storage": "private", "scheduler.prefetch": prefetch},
  )
  shape = synthetic.DocumentShape(
    name="small", contexts=8, queries=32, mean_input_tokens=2000, mean_output_tokens=4.0,
    mean_question_tokens=20,
  )  # fmt: skip
  workload = synthetic.documents(shape, order="spread")
  timed = [dataclasses.replace(r, arrival_s=float(r.request_id)) for r in workload.requests]
  workload = dataclasses.replace(workload, requests=tuple(timed))
  pools = simulation.PoolSizes(device_tokens=5_000, host_tokens=8_000)
  runs = [simulation.simulate(workload, machine, system, pools=pools) for _ in range(2)]
  first, again = (run.summary() for run in runs)
  assert first == again
  assert first["finished"] == 32
  if prefetch in ("best_effort", "cost"):  # an idle machine computes it sooner than the disk reads
    assert first["storage_hit_tokens"] == 0
    return
  assert first["storage_hit_tokens"] > 0
  without = simulation.simulate(
    workload, machine, simulation.system_with(system, {"storage": "none"}), pools=pools
  ).summary()
  assert without["storage_hit_tokens"] == 0
  assert first["computed_tokens"] < without["computed_tokens"]
