"""Transfers beside the compute: bytes, events, errors; the driver's part is played by the CPU."""

import threading

import jax
import numpy as np
import pytest

from strata_jax import config as config_lib
from strata_jax.executors import choices, fragment_copies, protocol, side_copies
from strata_jax.tiers import cuda_copies, device, host, layout
from tests.executors import test_overlap
from tests.tiers import cpu_driver

LAYOUT = layout.PageLayout(num_layers=3, page_size=4, kv_heads=2, head_dim=8, dtype="bfloat16")
pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="copies by the CPU")


@pytest.mark.parametrize("backend", ["copy_engine", "memcpy_async"])
def test_pages_arrive_and_their_neighbours_stay(monkeypatch, backend):
  cpu_driver.install(monkeypatch)
  rng = np.random.default_rng(0)
  pools = tuple(
    jax.numpy.asarray(rng.normal(size=pool.shape), pool.dtype)
    for pool in device.make_device_pool(LAYOUT, 9)
  )
  host_pool = host.make_host_pool(LAYOUT, 7)
  host.page_bytes(host_pool)[:] = 7
  copies = fragment_copies.FragmentCopies(LAYOUT, backend, pools, host_pool)
  backups = side_copies.SideCopies(copies, to_device=False)
  ends = []
  over = threading.Semaphore(0)

  def done(error):
    ends.append(error)
    over.release()

  for device_slots, host_slots in (([8, 0], [1, 6]), ([3], [2])):
    backups.start(np.array(host_slots, np.int32), np.array(device_slots, np.int32), done)
    assert over.acquire(timeout=10)
    np.testing.assert_array_equal(
      host.read_pages(host_pool, np.array(host_slots)).view(np.uint8),
      device.read_pages(pools, np.array(device_slots)).view(np.uint8),
    )
  assert ends == [None, None]
  assert (host.page_bytes(host_pool)[[0, 3, 4, 5]] == 7).all()


@pytest.mark.parametrize(("pages", "calls"), [(2, 1), (3, 2), (9, 3)])
def test_layers_of_a_few_pages_go_in_one_call(monkeypatch, pages, calls):
  cpu_driver.install(monkeypatch)
  monkeypatch.setattr(side_copies, "_PAGES_AT_ONCE", 6)
  submitted = []
  monkeypatch.setattr(
    cuda_copies, "submit_batch", lambda copies, _: submitted.append(copies.targets.size)
  )
  pools, host_pool = device.make_device_pool(LAYOUT, 9), host.make_host_pool(LAYOUT, 9)
  copies = fragment_copies.FragmentCopies(LAYOUT, "copy_engine", pools, host_pool)
  over = threading.Event()
  slots = np.arange(pages, dtype=np.int32)
  side_copies.SideCopies(copies, to_device=False).start(slots, slots, lambda _: over.set())
  assert over.wait(10)
  assert len(submitted) == calls
  assert sum(submitted) == LAYOUT.num_layers * pages


def aside(monkeypatch):
  """An executor on the CPU whose backups go by the stand-in of the driver."""
  cpu_driver.install(monkeypatch)
  monkeypatch.setattr(choices, "backups_aside", lambda *args: "copy_engine")
  monkeypatch.setattr(choices, "loads_aside", lambda *args: "copy_engine")
  return test_overlap.make_driver("whole")


def test_a_round_trip_through_an_executor(monkeypatch):
  drive = aside(monkeypatch)
  prompt = test_overlap.prompts()[0]
  ids = drive.generate(0, prompt, 3, np.arange(20))
  drive.backup(np.arange(17), np.arange(30, 47))
  before = device.read_pages(drive.executor.device_pool, np.arange(17))
  drive.load(np.arange(30, 47), np.arange(40, 57))
  after = device.read_pages(drive.executor.device_pool, np.arange(40, 57))
  np.testing.assert_array_equal(after, before)
  drive.executor.register(1, protocol.SamplingParams(), None)
  warm = drive.prefill(1, prompt, np.arange(40, 60), start=68)
  assert warm.tokens[1] == (ids[0],)


@pytest.mark.parametrize("way", [choices.STAGED, "copy_engine", "memcpy_async"])
def test_pages_of_another_type_than_the_model_go_aside_too(monkeypatch, way):
  cpu_driver.install(monkeypatch)
  monkeypatch.setattr(choices, "backups_aside", lambda *args: "copy_engine")
  monkeypatch.setattr(choices, "loads_aside", lambda *args: way)
  drive = test_overlap.make_driver("whole", kv_dtype="bfloat16")  # of a model in float32
  kept = test_overlap.fill_host(drive)[2]
  load = drive.load_work(kept, np.arange(40, 40 + len(kept)), transfer_id=5)
  drive.step(loads=(load,), parked_loads=(5,))
  pool = drive.executor.device_pool
  want = device.read_pages(pool, np.arange(len(kept)))  # of the last prompt, where it was computed
  np.testing.assert_array_equal(device.read_pages(pool, load.device_slots), want)
  np.testing.assert_array_equal(host.read_pages(drive.executor.host_pool, kept), want)


def test_a_slow_backup_holds_nothing_up(monkeypatch):
  may_copy = threading.Event()
  drive = aside(monkeypatch)
  copy = cpu_driver.copy

  def slow(copies, stream):
    assert may_copy.wait(10)
    copy(copies, stream)

  monkeypatch.setattr(cuda_copies, "submit_batch", slow)
  drive = test_overlap.make_driver("whole")
  drive.executor.register(0, protocol.SamplingParams(), None)
  drive.prefill(0, test_overlap.prompts()[0], np.arange(20))
  backup = protocol.BackupWork(
    transfer_id=3, node_ids=(), device_slots=np.arange(4, dtype=np.int32),
    host_slots=np.arange(4, dtype=np.int32), tokens=16,
  )  # fmt: skip
  work = drive.decode_work(0, 1, 70, np.arange(20))
  (done,) = drive.step(1, backups=(backup,), decodes=(work,))
  assert isinstance(done, protocol.StepDone)  # though the backup has not begun
  may_copy.set()
  (backed_up,) = drive.executor.wait(None)
  assert backed_up == protocol.BackupDone(3, backed_up.at_s)
  want = device.read_pages(drive.executor.device_pool, np.arange(4))
  np.testing.assert_array_equal(host.read_pages(drive.executor.host_pool, np.arange(4)), want)


@pytest.mark.parametrize("way", [choices.STAGED, "copy_engine", "memcpy_async"])
def test_a_prefill_waits_for_a_parked_load_that_it_reads(monkeypatch, way):
  """Of another request, say: its pages are on the way when the step is launched."""
  cpu_driver.install(monkeypatch)
  may_copy = threading.Event()

  def slow(copies, stream):
    assert may_copy.wait(10)
    cpu_driver.copy(copies, stream)

  monkeypatch.setattr(choices, "loads_aside", lambda *args: way)
  for name in ("submit_each", "submit_batch"):
    monkeypatch.setattr(cuda_copies, name, slow)
  drive = test_overlap.make_driver("whole")
  executor, prompt = drive.executor, test_overlap.prompts()[0]
  ids = drive.generate(0, prompt, 3, np.arange(20))
  drive.backup(np.arange(17), np.arange(30, 47))
  load = drive.load_work(np.arange(30, 47), np.arange(40, 57), transfer_id=5)
  executor.launch(protocol.StepWork(step_id=11, loads=(load,), parked_loads=(5,)))
  executor.register(1, protocol.SamplingParams(), None)
  timer = threading.Timer(0.2, may_copy.set)
  timer.start()
  work = test_overlap.prefill_work(1, prompt, 17, np.arange(40, 60), waits_for=(5,))
  loaded, done = drive.step(2, prefills=(work,))
  assert loaded == protocol.LoadDone(5, loaded.at_s)
  assert done.tokens[1] == (ids[0],)
  assert 0.15 < done.stall_s < done.prefill_end_s - done.started_s
  assert done.compute_s == pytest.approx(done.prefill_end_s - done.started_s - done.stall_s)
  timer.join()
  # The load is over: nobody waits for it any more.
  work = test_overlap.prefill_work(1, prompt, 17, np.arange(40, 60), waits_for=(5,))
  (again,) = drive.step(prefills=(work,))
  assert again.tokens == done.tokens
  assert again.stall_s == 0


@pytest.mark.parametrize(("to_device", "waits"), [(True, 4), (False, 1)])
def test_loads_let_the_inputs_of_steps_across_between_two_layers(monkeypatch, to_device, waits):
  cpu_driver.install(monkeypatch)
  monkeypatch.setattr(side_copies, "_PAGES_AT_ONCE", 4)
  seen = []
  monkeypatch.setattr(cpu_driver.SideStream, "synchronize", lambda self: seen.append(1))
  pools, host_pool = device.make_device_pool(LAYOUT, 9), host.make_host_pool(LAYOUT, 9)
  copies = fragment_copies.FragmentCopies(LAYOUT, "copy_engine", pools, host_pool)
  over = threading.Event()
  slots = np.arange(4, dtype=np.int32)
  side_copies.SideCopies(copies, to_device=to_device).start(slots, slots, lambda _: over.set())
  assert over.wait(10)
  assert len(seen) == waits


def test_backups_beside_a_step_start_once_it_is_launched(monkeypatch):
  drive = aside(monkeypatch)
  executor, started = drive.executor, []
  launch, start = executor._forward, executor._aside._backups.start
  monkeypatch.setattr(
    executor, "_forward", lambda *args: started.append("compute") or launch(*args)
  )
  monkeypatch.setattr(
    executor._aside._backups, "start", lambda *args: [started.append("backup"), start(*args)]
  )
  executor.register(0, protocol.SamplingParams(), None)
  drive.prefill(0, test_overlap.prompts()[0], np.arange(20))
  backup = protocol.BackupWork(
    transfer_id=3, node_ids=(), device_slots=np.arange(4, dtype=np.int32),
    host_slots=np.arange(4, dtype=np.int32), tokens=16,
  )  # fmt: skip
  work = test_overlap.prefill_work(0, test_overlap.prompts()[0], 0, np.arange(20))
  drive.step(2, backups=(backup,), prefills=(work,))
  assert started == ["compute", "compute", "backup"]


def test_parked_loads_hold_nothing_up_and_the_others_wait_their_turn(monkeypatch):
  drive = aside(monkeypatch)
  kept = test_overlap.fill_host(drive)
  may_copy = threading.Event()

  def slow(copies, stream):
    assert may_copy.wait(10)
    cpu_driver.copy(copies, stream)

  monkeypatch.setattr(cuda_copies, "submit_batch", slow)
  drive = test_overlap.make_driver("whole", pools=drive.executor.take_pools())
  drive.executor.register(0, protocol.SamplingParams(), None)
  parked = drive.load_work(kept[1], np.arange(40, 40 + len(kept[1])), transfer_id=5)
  other = drive.load_work(kept[0], np.arange(60, 60 + len(kept[0])), transfer_id=6)
  work = test_overlap.prefill_work(0, test_overlap.prompts()[0], 0, np.arange(20))
  loaded, done = drive.step(2, loads=(parked, other), parked_loads=(5,), prefills=(work,))
  assert loaded.transfer_id == 6
  assert isinstance(done, protocol.StepDone)
  may_copy.set()
  (loaded,) = drive.executor.wait(None)
  assert loaded == protocol.LoadDone(5, loaded.at_s)
  for slots, first in ((kept[1], 40), (kept[0], 60)):
    arrived = device.read_pages(drive.executor.device_pool, np.arange(first, first + len(slots)))
    want = host.read_pages(drive.executor.host_pool, slots)
    np.testing.assert_array_equal(arrived, want)


def test_a_backup_whose_pages_are_evicted_is_not_put_aside(monkeypatch):
  drive = aside(monkeypatch)

  def refuse(copies, stream):
    raise AssertionError("put aside")

  monkeypatch.setattr(cuda_copies, "submit_batch", refuse)
  backup = protocol.BackupWork(
    transfer_id=3, node_ids=(), device_slots=np.arange(4, dtype=np.int32),
    host_slots=np.arange(4, dtype=np.int32), tokens=16, evicts=True,
  )  # fmt: skip
  (done,) = drive.step(1, backups=(backup,))
  assert done == protocol.BackupDone(3, done.at_s)


def test_a_parked_load_waits_its_turn_while_an_earlier_step_still_evicts(monkeypatch):
  aside(monkeypatch)
  may_end = threading.Event()

  def refuse(copies, stream):
    raise AssertionError("put aside")

  monkeypatch.setattr(cuda_copies, "submit_batch", refuse)
  drive = test_overlap.make_driver("whole")
  executor = drive.executor
  monkeypatch.setattr(executor, "_block_on_host", lambda: may_end.wait(10))
  slots = np.arange(4, dtype=np.int32)
  backup = protocol.BackupWork(
    transfer_id=3, node_ids=(), device_slots=slots, host_slots=slots, tokens=16, evicts=True
  )
  executor.launch(protocol.StepWork(step_id=0, backups=(backup,)))
  load = drive.load_work(slots + 8, slots, transfer_id=5)  # to the pages that are evicted
  executor.launch(protocol.StepWork(step_id=1, loads=(load,), parked_loads=(5,)))
  may_end.set()
  ended = []
  while len(ended) < 2:
    ended += executor.wait(None)
  assert [type(event) for event in ended] == [protocol.BackupDone, protocol.LoadDone]


def test_an_error_of_the_driver_reaches_who_waits(monkeypatch):
  drive = aside(monkeypatch)

  def fail(copies, stream):
    raise RuntimeError("cudaMemcpyBatchAsync: CUDA error 700")

  monkeypatch.setattr(cuda_copies, "submit_batch", fail)
  drive = test_overlap.make_driver("whole")
  with pytest.raises(RuntimeError, match="CUDA error 700"):
    drive.backup(np.arange(4), np.arange(4))


def test_which_backups_are_put_aside():
  def choose(store_io, page_size, on_gpu=True):
    page_layout = config_lib.MODELS["llama31_8b"].page_layout(page_size)
    return choices.backups_aside(store_io, page_layout, on_gpu)

  assert choose("auto", 16) == "copy_engine"  # fragments of 64 KiB
  assert choose("auto", 1) is None
  assert choose("memcpy_async", 1) == "memcpy_async"
  assert choose("copy_engine", 1) == "copy_engine"
  assert choose("kernel", 16) is None
  assert choose("auto", 16, on_gpu=False) is None


def test_how_loads_run_beside_compute():
  def choose(function, io, page_size, on_gpu=True):
    return function(io, config_lib.MODELS["llama31_8b"].page_layout(page_size), on_gpu)

  assert choose(choices.layer_loads, "auto", 32) == "copy_engine"  # fragments of 128 KiB
  assert choose(choices.layer_loads, "auto", 16) == "kernel"
  assert choose(choices.layer_loads, "kernel", 32) == "kernel"
  assert choose(choices.layer_loads, "auto", 32, on_gpu=False) == "auto"
  assert choose(choices.loads_aside, "auto", 32) == choices.STAGED
  assert choose(choices.loads_aside, "auto", 2) == choices.STAGED  # pages of 256 KiB
  assert choose(choices.loads_aside, "auto", 1) is None
  assert choose(choices.loads_aside, "memcpy_async", 1) == "memcpy_async"
  assert choose(choices.loads_aside, "kernel", 32) is None
  assert choose(choices.loads_aside, "copy_engine", 32, on_gpu=False) is None
