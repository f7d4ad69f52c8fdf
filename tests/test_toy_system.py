import pytest

from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import make_policy, schedule
from strata_jax.scheduler.views import Budgets, Deferred, Prefill, StepPlan
from strata_jax.toy_system import ToyRequest, ToySystem

BUDGETS = Budgets(page_size=16, step_tokens=128, batch_requests=4, running_requests=4)


def _system(**more) -> ToySystem:
  more.setdefault("device_pages", 64)
  return ToySystem(BUDGETS, **more)


def _request(request_id: int, *blocks: tuple[str, int], tail: int = 5, output: int = 1):
  return ToyRequest(request_id=request_id, blocks=blocks, tail_tokens=tail, output_tokens=output)


def test_a_prompt_in_chunks_then_decode():
  system, policy = _system(), make_policy("fcfs")
  system.add(_request(0, ("a", 192), output=3))
  ranges = [system.step(policy).prefill for _ in range(2)]
  assert ranges == [((0, (), 0, 128),), ((0, (), 128, 197),)]
  assert [system.step(policy).decode for _ in range(2)] == [(0,), (0,)]
  assert system.finished == [0]
  view = system.view()
  assert (view.free_pages, view.evictable_pages) == (52, 12)


def test_states_of_a_path():
  system, policy = _system(), make_policy("fcfs")
  system.add(_request(0, ("a", 128), ("b", 64)))
  system.step(policy)
  system.add(_request(1, ("a", 128), ("b", 64), ("c", 32)))
  (waiting,) = system.view().waiting
  assert [span.state for span in waiting.path] == ["device", "in_flight", "in_queue"]
  assert system.view().in_flight[waiting.path[1].node_id] == (0, 64)


def test_the_finished_chunks_of_an_aborted_producer_stay():
  system, policy = _system(), make_policy("strata")
  system.add(_request(0, ("a", 128), ("b", 256)))
  system.add(_request(1, ("a", 128), ("b", 256)))
  system.step(policy)
  plan = system.step(policy)
  assert [d.request_id for d in plan.deferred] == []  # all tokens went to the producer
  system.abort(0)
  (waiting,) = system.view().waiting
  assert [span.state for span in waiting.path] == ["device", "in_queue"]
  assert system.step(policy).prefill[0][:3] == (1, (), 128)


def test_deferrals_count_unless_the_producer_progressed():
  system = _system()
  system.add(_request(0, ("a", 640)))
  system.add(_request(1, ("a", 640)))
  system.step(make_policy("fcfs"))  # 128 tokens of request 0
  counts = []
  for start, end in ((128, 256), (256, 384), (0, 0), (0, 0), (384, 512), (512, 645)):
    view = system.view()
    waits_on = tuple(span.node_id for span in view.waiting[0].path)
    prefill = (Prefill(0, (), start, end),) if start else ()
    deferred = (Deferred(1, "in_flight", waits_on),)
    system.apply(view, StepPlan(version=view.version, prefill=prefill, deferred=deferred))
    counts.append(system.live[1].deferrals)
    assert system.live[1].front
  assert counts == [0, 0, 1, 2, 2, 2]


def _fields(view):
  return {name: getattr(view, name) for name in view.__dataclass_fields__}


def test_eviction_takes_old_leaves_and_host_copies_stay():
  system, policy = _system(device_pages=16), make_policy("fcfs")
  for request_id, name in enumerate("abc"):
    system.add(_request(request_id, (name, 96)))
    system.step(policy)
  system.add(_request(3, ("a", 96)))
  (waiting,) = system.view().waiting
  assert [span.state for span in waiting.path] == ["host"]
  plan = system.step(policy)
  assert plan.prefill[0].loads == ((waiting.path[0].node_id, 96),)
  assert system.loaded_tokens == 96


def test_a_plan_for_more_pages_than_there_are_fails():
  system = _system(device_pages=4)
  system.add(_request(0, ("a", 96)))
  view = system.view()
  roomy = type(view)(**{**_fields(view), "free_pages": 99, "capacity_pages": 99})
  plan = schedule(roomy, SchedulerConfig())
  with pytest.raises(AssertionError, match="needs 7 pages of 4"):
    system.apply(view, plan)


def test_blocks_are_whole_pages():
  with pytest.raises(ValueError, match="expected whole pages"):
    _system().add(_request(0, ("a", 10)))
