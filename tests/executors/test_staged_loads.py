"""Parked loads through buffers: bytes, order, buffers that are not free, errors."""

import gc
import queue
import threading

import jax
import numpy as np
import pytest

from strata_jax.executors import choices, protocol, staged_loads
from strata_jax.tiers import cuda_copies, device, host, layout
from tests.executors import test_overlap
from tests.tiers import cpu_driver

LAYOUT = layout.PageLayout(num_layers=3, page_size=4, kv_heads=2, head_dim=8, dtype="bfloat16")
pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="copies by the CPU")


@pytest.fixture(autouse=True)
def _driver(monkeypatch):
  cpu_driver.install(monkeypatch)
  monkeypatch.setattr(choices, "loads_aside", lambda *args: choices.STAGED)


def random_host(pages):
  host_pool = host.make_host_pool(LAYOUT, pages)
  memory = host.page_bytes(host_pool)
  memory[:] = np.random.default_rng(0).integers(0, 100, memory.shape)
  return host_pool


@pytest.mark.parametrize("buffer_pages", [1, 2, 8])
def test_loads_of_any_length_arrive_and_their_neighbours_stay(monkeypatch, buffer_pages):
  monkeypatch.setattr(staged_loads, "BUFFER_BYTES", buffer_pages * LAYOUT.page_bytes)
  host_pool, pools = random_host(20), device.make_device_pool(LAYOUT, 24)
  loads = staged_loads.StagedLoads(LAYOUT, host_pool, jax.devices()[0], table_pages=20)
  pools = loads.warm(pools)
  posts: queue.SimpleQueue = queue.SimpleQueue()
  lists = [([19, 3, 7, 0, 11], [0, 23, 5, 2, 9]), ([1], [4]), (range(13), range(10, 23))]
  ends = []
  for transfer_id, (host_slots, device_slots) in enumerate(lists):
    loads.start(transfer_id, np.array(host_slots), np.array(device_slots), posts.put)
  for _ in range(sum(loads.parts(len(slots)) for slots, _ in lists)):
    part = posts.get(timeout=10)
    pools = loads.spread(part, pools)
    ends += [part.transfer_id] * part.is_last
  assert ends == [0, 1, 2]
  written = {}
  for host_slots, device_slots in lists:
    written |= dict(zip(device_slots, host_slots, strict=True))
  got = device.read_pages(pools, np.arange(24)).view(np.uint8)
  want = np.zeros_like(got)
  want[list(written)] = host.read_pages(host_pool, np.array(list(written.values()))).view(np.uint8)
  np.testing.assert_array_equal(got, want)


def test_a_buffer_is_not_written_before_it_was_emptied(monkeypatch):
  monkeypatch.setattr(staged_loads, "BUFFER_BYTES", LAYOUT.page_bytes)
  host_pool, pools = random_host(20), device.make_device_pool(LAYOUT, 24)
  loads = staged_loads.StagedLoads(LAYOUT, host_pool, jax.devices()[0], table_pages=20)
  posts: queue.SimpleQueue = queue.SimpleQueue()
  pages = staged_loads.BUFFERS + 2
  loads.start(0, np.arange(pages), np.arange(pages), posts.put)
  parts = [posts.get(timeout=10) for _ in range(staged_loads.BUFFERS)]
  with pytest.raises(queue.Empty):
    posts.get(timeout=0.1)  # all buffers are full
  for part in parts:
    pools = loads.spread(part, pools)
  for _ in range(2):
    pools = loads.spread(posts.get(timeout=10), pools)
  np.testing.assert_array_equal(
    device.read_pages(pools, np.arange(pages)).view(np.uint8),
    host.read_pages(host_pool, np.arange(pages)).view(np.uint8),
  )


def test_the_driver_has_few_copies_at_a_time(monkeypatch):
  monkeypatch.setattr(staged_loads, "SLICE_BYTES", 2 * LAYOUT.page_bytes + 1)
  under_way = []
  sizes = []

  class Stream(cpu_driver.SideStream):
    def synchronize(self):
      under_way.clear()

  def submit(copies, stream):
    assert not under_way
    under_way.append(copies)
    sizes.append(len(copies.targets))
    cpu_driver.copy(copies, stream)

  monkeypatch.setattr(cuda_copies, "SideStream", Stream)
  monkeypatch.setattr(cuda_copies, "submit_batch", submit)
  host_pool, pools = random_host(20), device.make_device_pool(LAYOUT, 24)
  loads = staged_loads.StagedLoads(LAYOUT, host_pool, jax.devices()[0], table_pages=20)
  posts: queue.SimpleQueue = queue.SimpleQueue()
  slots = np.arange(13)
  loads.start(0, slots + 7, slots, posts.put)
  pools = loads.spread(posts.get(timeout=10), pools)
  assert sizes == [2] * 6 + [1]
  np.testing.assert_array_equal(
    device.read_pages(pools, slots).view(np.uint8),
    host.read_pages(host_pool, slots + 7).view(np.uint8),
  )


@pytest.mark.parametrize("buffer_pages", [3, 100])
def test_an_executor_parks_by_them(monkeypatch, buffer_pages):
  drive = test_overlap.make_driver("whole")
  kept = test_overlap.fill_host(drive)
  monkeypatch.setattr(
    staged_loads,
    "BUFFER_BYTES",
    buffer_pages * drive.executor.host_pool.nbytes // test_overlap.HOST_PAGES,
  )
  may_copy = threading.Event()

  def slow(copies, stream):
    assert may_copy.wait(10)
    cpu_driver.copy(copies, stream)

  monkeypatch.setattr(cuda_copies, "submit_batch", slow)
  drive = test_overlap.make_driver("whole", chunks=(16,), pools=drive.executor.take_pools())
  drive.executor.warmup()
  drive.executor.register(0, protocol.SamplingParams(), None)
  parked = drive.load_work(kept[1], np.arange(40, 40 + len(kept[1])), transfer_id=5)
  work = test_overlap.prefill_work(0, test_overlap.prompts()[0], 0, np.arange(20))
  (done,) = drive.step(loads=(parked,), parked_loads=(5,), prefills=(work,))
  assert isinstance(done, protocol.StepDone)  # though the load has not begun
  assert drive.executor.wait(drive.executor.now_s() + 0.05) == []
  may_copy.set()
  (loaded,) = drive.executor.wait(None)
  assert loaded == protocol.LoadDone(5, loaded.at_s)
  assert done.at_s < loaded.at_s <= drive.executor.now_s()
  arrived = device.read_pages(drive.executor.device_pool, np.arange(40, 40 + len(kept[1])))
  np.testing.assert_array_equal(arrived, host.read_pages(drive.executor.host_pool, kept[1]))
  assert drive.executor.recompiles == 0


def test_a_backup_beside_a_step_waits_for_what_is_still_to_be_spread(monkeypatch):
  """Its stream is not the compute's: an event of the load alone does not put it behind the load."""
  monkeypatch.setattr(choices, "backups_aside", lambda *args: "copy_engine")
  drive = test_overlap.make_driver("whole")
  kept, executor = test_overlap.fill_host(drive)[1], drive.executor
  ones = jax.numpy.ones((512, 512))

  @jax.jit
  def late(slots):
    result = jax.lax.fori_loop(0, 50, lambda _, one: jax.numpy.sin(one @ ones), ones)
    return slots + (result[0, 0] > 2)

  spread = executor._aside.staged._spread
  executor._aside.staged._spread = lambda buffer, pools, slots, count: spread(
    buffer, pools, late(slots), count
  )
  slots = np.arange(40, 40 + len(kept))
  load = drive.load_work(kept, slots, transfer_id=5)
  (done,) = drive.step(loads=(load,), parked_loads=(5,))
  assert done == protocol.LoadDone(5, done.at_s)
  to = np.setdiff1d(np.arange(test_overlap.HOST_PAGES), kept)[: len(kept)]
  drive.backup(slots, to)
  np.testing.assert_array_equal(
    host.read_pages(executor.host_pool, to), host.read_pages(executor.host_pool, kept)
  )


def test_an_error_of_the_driver_reaches_who_waits(monkeypatch):
  drive = test_overlap.make_driver("whole")

  def fail(copies, stream):
    raise RuntimeError("cudaMemcpyBatchAsync: CUDA error 700")

  monkeypatch.setattr(cuda_copies, "submit_batch", fail)
  load = drive.load_work(np.arange(4), np.arange(4), transfer_id=5)
  drive.executor.launch(protocol.StepWork(step_id=1, loads=(load,), parked_loads=(5,)))
  with pytest.raises(RuntimeError, match="CUDA error 700"):
    drive.executor.wait(None)


def test_a_load_of_no_pages_arrives_too():
  host_pool, pools = random_host(4), device.make_device_pool(LAYOUT, 4)
  loads = staged_loads.StagedLoads(LAYOUT, host_pool, jax.devices()[0], table_pages=4)
  posts: queue.SimpleQueue = queue.SimpleQueue()
  nothing = np.zeros(0, np.int32)
  loads.start(3, nothing, nothing, posts.put)
  assert loads.parts(0) == 1
  part = posts.get(timeout=10)
  pools = loads.spread(part, pools)
  assert (part.transfer_id, part.is_last) == (3, True)
  assert not device.read_pages(pools, np.arange(4)).any()


def test_what_is_queued_when_the_owner_goes_is_left_alone(monkeypatch):
  """Its pools go as well: nothing may be copied from or to memory that others may have by then."""
  began, may_copy = threading.Event(), threading.Event()
  submitted = []

  def slow(copies, stream):
    submitted.append(copies)
    began.set()
    assert may_copy.wait(10)
    cpu_driver.copy(copies, stream)

  monkeypatch.setattr(cuda_copies, "submit_batch", slow)
  monkeypatch.setattr(staged_loads, "BUFFER_BYTES", 5 * LAYOUT.page_bytes)
  host_pool = random_host(20)
  before = set(threading.enumerate())
  loads = staged_loads.StagedLoads(LAYOUT, host_pool, jax.devices()[0], table_pages=20)
  (thread,) = set(threading.enumerate()) - before
  shape = LAYOUT.host_shape(5)
  buffers = lambda: sum(array.shape == shape for array in jax.live_arrays())
  there = buffers()
  posts: queue.SimpleQueue = queue.SimpleQueue()
  for transfer_id in range(2):
    loads.start(transfer_id, np.arange(8), np.arange(8), posts.put)
  assert began.wait(10)
  del loads
  gc.collect()
  assert buffers() == there > 0  # one of them is being written to
  may_copy.set()
  thread.join(10)
  assert not thread.is_alive()
  assert len(submitted) == 1
  gc.collect()
  assert not buffers()


def test_the_thread_ends_though_nobody_empties_the_buffers():
  host_pool = random_host(20)
  before = set(threading.enumerate())
  loads = staged_loads.StagedLoads(LAYOUT, host_pool, jax.devices()[0], table_pages=1)
  (thread,) = set(threading.enumerate()) - before
  posts: queue.SimpleQueue = queue.SimpleQueue()
  loads.start(0, np.arange(9), np.arange(9), posts.put)
  for _ in range(staged_loads.BUFFERS):
    posts.get(timeout=10)
  del loads
  gc.collect()
  thread.join(10)
  assert not thread.is_alive()


def test_an_executor_hands_over_the_end_of_a_parked_load_of_no_pages():
  drive = test_overlap.make_driver("whole")
  load = drive.load_work(np.zeros(0, int), np.zeros(0, int), transfer_id=5)
  (done,) = drive.step(loads=(load,), parked_loads=(5,))
  assert done == protocol.LoadDone(5, done.at_s)


def test_waiting_ends_in_time_when_only_parts_come():
  """Parts that are not the last of their load are no events."""
  drive = test_overlap.make_driver("whole")
  executor = drive.executor
  spread = []
  executor._aside.staged.spread = lambda part, pools: spread.append(part) or pools
  part = lambda is_last: staged_loads.Arrived(
    transfer_id=5, buffer=0, device_slots=np.zeros(0, np.int32), is_last=is_last, at_s=0.0
  )
  executor._watcher.expect(3)
  for _ in range(2):
    executor._watcher.post(part(False))
  until_s = executor.now_s() + 0.05
  assert executor.wait(until_s) == []
  assert until_s <= executor.now_s() < until_s + 5
  assert executor.wait(executor.now_s() - 1) == []  # a time that is over
  executor._watcher.post(part(True))
  (done,) = executor.wait(None)
  assert done.transfer_id == 5
  assert len(spread) == 3
  with pytest.raises(RuntimeError, match="nothing is under way"):
    executor.wait(None)


def test_pools_are_not_taken_while_a_load_is_under_way():
  drive = test_overlap.make_driver("whole")
  pools = drive.executor.device_pool
  load = drive.load_work(np.arange(4), np.arange(4), transfer_id=5)
  drive.executor.launch(protocol.StepWork(step_id=1, loads=(load,), parked_loads=(5,)))
  with pytest.raises(RuntimeError, match="expected nothing under way"):
    drive.executor.take_pools()
  assert drive.executor.device_pool is pools
  (done,) = drive.executor.wait(None)
  assert done.transfer_id == 5
  taken = drive.executor.take_pools()
  drive.executor.give_pools(taken)
  assert drive.executor.device_pool is taken[0]
