"""The copies that gates ask for, carried out on the CPU, and the order of events."""

import threading
import time

import jax
import numpy as np
import pytest

from strata_jax.executors import fragment_copies, gated_loads
from strata_jax.tiers import cuda_copies, device, host, layout
from tests.tiers import cpu_driver

LAYOUT = layout.PageLayout(num_layers=3, page_size=4, kv_heads=2, head_dim=8, dtype="bfloat16")


def make(backend, pools, host_pool):
  copies = fragment_copies.FragmentCopies(LAYOUT, backend, pools, host_pool)
  return gated_loads.GatedLoads(copies)


class Runtime:
  """Notes what is called; events are numbers, those of the copies first."""

  def __init__(self):
    self.calls = []
    self.events = 0
    self.times_s = {}
    self.unfinished = set()  # events whose copies are under way

  def cudaEventCreateWithFlags(self, flags):
    self.events += 1
    return 0, self.events - 1

  def cudaEventRecord(self, event, stream):
    self.times_s[event] = time.perf_counter()
    if event < LAYOUT.num_layers:
      self.calls.append(("record", event))
    return (0,)

  def cudaEventElapsedTime(self, start, end):
    return 0, (self.times_s[end] - self.times_s[start]) * 1e3

  def cudaEventQuery(self, event):
    return (600 if event in self.unfinished else 0,)

  def cudaEventSynchronize(self, event):
    return (0,)

  def cudaStreamWaitEvent(self, stream, event, flags):
    self.calls.append(("wait", event))
    return (0,)


@pytest.fixture
def runtime(monkeypatch):
  fake = Runtime()
  cpu_driver.install(monkeypatch)
  monkeypatch.setattr(cuda_copies, "cuda_module", lambda name: fake)
  return fake


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="copies by the CPU")
@pytest.mark.parametrize("backend", gated_loads.BACKENDS)
def test_every_layer_waits_for_its_own_copies(runtime, backend):
  pools, host_pool = device.make_device_pool(LAYOUT, 9), host.make_host_pool(LAYOUT, 7)
  rng = np.random.default_rng(0)
  memory = host.page_bytes(host_pool)
  memory[:] = rng.integers(0, 100, memory.shape)
  gated = make(backend, pools, host_pool)
  at = device.buffer_pointers(pools)
  warmed, *others = pools
  pools = (gated.warm(warmed), *others)
  assert runtime.calls == []
  once = [("record", 0), ("record", 1), ("record", 2), ("wait", 0), ("wait", 1), ("wait", 2)]
  for slots in (([1, 6], [8, 0]), ([2], [4])):
    host_slots, device_slots = (np.array(side, np.int32) for side in slots)
    gate = gated.begin(host_slots, device_slots)
    pools = tuple(jax.block_until_ready(gate.hold(layer, pool)) for layer, pool in enumerate(pools))
    np.testing.assert_array_equal(
      device.read_pages(pools, device_slots).view(np.uint8),
      host.read_pages(host_pool, host_slots).view(np.uint8),
    )
    # Layers in order, and no wait before what it waits for was submitted.
    assert [call for call in runtime.calls if call[0] == "record"] == once[:3]
    assert [call for call in runtime.calls if call[0] == "wait"] == once[3:]
    assert all(
      runtime.calls.index(("record", layer)) < runtime.calls.index(("wait", layer))
      for layer in range(3)
    )
    runtime.calls.clear()
  assert device.buffer_pointers(pools) == at


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="copies by the CPU")
def test_copies_are_submitted_while_the_first_layer_is_held_up(runtime):
  pools, host_pool = device.make_device_pool(LAYOUT, 9), host.make_host_pool(LAYOUT, 7)
  gated = make("copy_engine", pools, host_pool)
  gate = gated.begin(np.array([1], np.int32), np.array([2], np.int32))
  jax.block_until_ready(gate.hold(0, pools[0]))
  deadline = time.monotonic() + 10
  while ("record", 2) not in runtime.calls and time.monotonic() < deadline:
    time.sleep(0.001)
  assert ("record", 2) in runtime.calls  # layers 1 and 2 were not asked for yet
  assert ("wait", 1) not in runtime.calls


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="copies by the CPU")
def test_layers_are_loaded_once_their_copies_are_submitted_and_done(runtime, monkeypatch):
  go_on = [threading.Event() for _ in range(LAYOUT.num_layers)]

  def held_up(copies, stream):
    assert go_on[len([call for call in runtime.calls if call[0] == "record"])].wait(10)
    cpu_driver.copy(copies, stream)

  monkeypatch.setattr(cuda_copies, "submit_batch", held_up)
  pools, host_pool = device.make_device_pool(LAYOUT, 9), host.make_host_pool(LAYOUT, 7)
  gated = make("copy_engine", pools, host_pool)
  gate = gated.begin(np.array([1], np.int32), np.array([2], np.int32))
  assert not gate.is_loaded(0)  # its event is over, but stands for no copies yet
  go_on[0].set()
  jax.block_until_ready(gate.hold(0, pools[0]))
  assert gate.is_loaded(0)
  assert not gate.is_loaded(1)
  runtime.unfinished = {1, 2}
  go_on[1].set()
  go_on[2].set()
  deadline = time.monotonic() + 10
  while ("record", 2) not in runtime.calls and time.monotonic() < deadline:
    time.sleep(0.001)
  assert not gate.is_loaded(1)
  runtime.unfinished = set()
  while not gate.is_loaded(2):
    assert time.monotonic() < deadline
  jax.block_until_ready(gate.hold(2, pools[2]))
  assert [call for call in runtime.calls if call[0] == "wait"] == [("wait", 0), ("wait", 2)]
  assert gated.stalled_s() >= 0  # of the gates that there were
  runtime.cudaEventQuery = lambda event: (700,)
  with pytest.raises(RuntimeError, match="cudaEventQuery: CUDA error 700"):
    gate.is_loaded(2)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="copies by the CPU")
def test_copies_are_submitted_a_few_layers_ahead_of_the_link(runtime, monkeypatch):
  done = [threading.Event() for _ in range(LAYOUT.num_layers)]
  monkeypatch.setattr(gated_loads, "_LAYERS_AHEAD", 2)
  monkeypatch.setattr(
    Runtime, "cudaEventSynchronize", lambda self, event: (not done[event].wait(10),)
  )
  pools, host_pool = device.make_device_pool(LAYOUT, 9), host.make_host_pool(LAYOUT, 7)
  gated = make("copy_engine", pools, host_pool)
  gate = gated.begin(np.array([1], np.int32), np.array([2], np.int32))
  for layer in (0, 1):
    jax.block_until_ready(gate.hold(layer, pools[layer]))
  time.sleep(0.05)
  assert ("record", 2) not in runtime.calls  # the copies of layer 0 are not done
  done[0].set()
  jax.block_until_ready(gate.hold(2, pools[2]))
  assert ("record", 2) in runtime.calls


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="copies by the CPU")
@pytest.mark.parametrize("late", [False, True])
def test_standing_at_gates_is_measured(runtime, monkeypatch, late):
  def slow(copies, stream):
    time.sleep(0.05)
    cpu_driver.copy(copies, stream)

  monkeypatch.setattr(cuda_copies, "submit_batch", slow)
  pools, host_pool = device.make_device_pool(LAYOUT, 9), host.make_host_pool(LAYOUT, 7)
  gated = make("copy_engine", pools, host_pool)
  gated.warm(device.make_device_pool(LAYOUT, 9)[0])
  gate = gated.begin(np.array([1], np.int32), np.array([2], np.int32))
  started_s = time.perf_counter()
  for layer, pool in enumerate(pools):
    jax.block_until_ready(gate.hold(layer, pool))
    if late:  # the compute of the layer takes longer than all copies
      time.sleep(0.2)
  if late:  # at the first gate alone
    assert 0.05 <= gated.stalled_s() < 0.15
  else:
    assert 0.1 < gated.stalled_s() <= time.perf_counter() - started_s


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="copies by the CPU")
def test_a_copy_that_is_refused_is_raised_where_it_is_waited_for(runtime, monkeypatch):
  monkeypatch.setattr(Runtime, "cudaEventRecord", lambda self, event, stream: (700,))
  pools, host_pool = device.make_device_pool(LAYOUT, 9), host.make_host_pool(LAYOUT, 7)
  gated = make("copy_engine", pools, host_pool)
  gate = gated.begin(np.array([1], np.int32), np.array([2], np.int32))
  with pytest.raises(jax.errors.JaxRuntimeError, match="cudaEventRecord: CUDA error 700"):
    jax.block_until_ready(gate.hold(0, pools[0]))
  with pytest.raises(jax.errors.JaxRuntimeError, match="cudaEventRecord: CUDA error 700"):
    jax.block_until_ready(gate.hold(1, pools[1]))  # and waits for nothing that will not come


def test_no_gate_waits_for_copies_that_the_first_could_not_start(runtime, monkeypatch):
  def fail(self, stream):
    raise RuntimeError("cudaStreamWaitEvent: CUDA error 700")

  monkeypatch.setattr(cpu_driver.SideStream, "wait_for", fail)
  pools, host_pool = device.make_device_pool(LAYOUT, 9), host.make_host_pool(LAYOUT, 7)
  gated = make("copy_engine", pools, host_pool)
  gated._program = lambda pool: pool  # the actions are taken below
  gate = gated.begin(np.array([1], np.int32), np.array([2], np.int32))
  errors = []

  def act():
    try:
      gated._actions.get_nowait()(0)
    except RuntimeError as error:
      errors.append(str(error))

  for layer, pool in enumerate(pools):
    gate.hold(layer, pool)
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
  assert errors == ["cudaStreamWaitEvent: CUDA error 700"] * LAYOUT.num_layers


def test_an_error_of_cuda_is_raised(runtime, monkeypatch):
  monkeypatch.setattr(Runtime, "cudaEventCreateWithFlags", lambda self, flags: (700, None))
  pools, host_pool = device.make_device_pool(LAYOUT, 2), host.make_host_pool(LAYOUT, 2)
  with pytest.raises(RuntimeError, match="cudaEventCreateWithFlags: CUDA error 700"):
    make("copy_engine", pools, host_pool)
