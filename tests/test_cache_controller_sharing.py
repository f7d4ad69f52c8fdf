"""Tests of the controller with requests that share prompts: transient nodes, chunks, aborts."""

import numpy as np
import pytest

from strata_jax.scheduler.views import Deferred, Load, Prefill
from tests.controller_harness import Harness, tokens

LONG = tokens((0, 100))


def test_waiting_twins_share_one_transient_node():
  h = Harness(device_pages=64)
  first, second = h.add(LONG), h.add(LONG)
  assert h.path(first) == h.path(second) == [("in_queue", 96)]
  assert h.waiting(first).path == h.waiting(second).path
  h.prefill(first)
  assert h.path(second) == [("in_flight", 96)]
  view = h.view()
  assert view.in_flight == {view.waiting[0].path[0].node_id: (first, 96)}
  h.step_done()
  assert h.path(second) == [("device", 96)]


def test_a_sharer_is_released_when_its_part_is_computed():
  h = Harness(device_pages=64)
  producer, sharer = h.add(LONG), h.add(tokens((0, 60), (200, 10)))
  assert h.path(sharer) == [("in_queue", 60), ("in_queue", 8)]
  h.prefill(producer, chunk=40)
  assert h.path(sharer) == [("in_flight", 60), ("in_queue", 8)]
  h.step_done()
  assert h.path(sharer) == [("device", 40), ("in_flight", 20), ("in_queue", 8)]
  view = h.view()
  assert sorted(view.in_flight.values()) == [(producer, 20), (producer, 56)]
  h.prefill(producer, chunk=20)
  h.step_done()
  assert h.path(sharer) == [("device", 40), ("device", 20), ("in_queue", 8)]
  h.prefill(sharer)
  h.step_done()
  assert h.hits(sharer) == (60, 0)


@pytest.mark.parametrize("phase", ["running", "paused", "parked", "preempted"])
def test_a_producer_that_is_gone_leaves_its_chunks_and_nothing_in_flight(phase):
  h = Harness(device_pages=64)
  if phase == "parked":
    h.run(tokens((0, 17)))
    for slots in h.controller.tree.evict(0, 99):
      h.controller.tiers.device.free(slots)
  before = h.free_pages()
  producer, twin = h.add(LONG), h.add(LONG)
  h.view()
  h.prefill(producer, chunk=40, park=(producer,) if phase == "parked" else ())
  assert "in_flight" in {state for state, _ in h.path(twin)}
  if phase in ("paused", "preempted"):
    h.step_done()
  assert {entry.request_id for entry in h.view().in_flight.values()} == {producer}
  if phase == "preempted":
    h.apply(preempt=(producer,))
    assert h.path(producer) == h.path(twin)
  else:
    h.abort(producer)
  if phase == "running":
    assert h.path(twin) == [("in_flight", 96)]  # its chunk is being computed
    h.step_done()
  if phase == "parked":
    assert h.path(twin) == [("loading", 16), ("in_queue", 80)]
    h.load_done()
    assert h.path(twin) == [("device", 16), ("in_queue", 80)]
  else:
    assert h.path(twin) == [("device", 40), ("in_queue", 56)]
  assert not h.view().in_flight
  h.prefill(twin)
  h.step_done()
  h.finish(twin)
  h.abort(producer)  # waits, where it was preempted
  h.flush()
  h.transfers_done()
  assert h.free_pages() == before


def test_an_aborted_waiting_request_leaves_nothing():
  h = Harness(device_pages=64)
  first, second = h.add(LONG), h.add(tokens((0, 60), (200, 10)))
  h.abort(first)
  assert h.path(second) == [("in_queue", 60), ("in_queue", 8)]
  h.abort(second)
  assert not h.controller.tree.nodes
  assert not list(h.controller.tree.roots())
  h.abort(second)  # again: nothing
  assert h.controller.stats.aborted == 2


def test_the_second_producer_goes_on_when_the_first_aborts():
  h = Harness(device_pages=64)
  first, second = h.add(LONG), h.add(LONG)
  h.prefill(first, second, chunk=40)
  assert set(h.view().in_flight.values()) == {(first, 96)}
  h.abort(first)
  h.step_done()
  assert set(h.view().in_flight.values()) == {(second, 56)}
  h.prefill(second)
  h.step_done()
  assert h.held(LONG)[0] == 100


def test_every_chunk_consults_the_cache():
  """The second starts behind the first, which overtakes it: it uses the first's pages."""
  h = Harness(device_pages=128)
  slow, fast = h.add(LONG), h.add(LONG)
  h.prefill(slow, chunk=20)
  h.step_done()
  view = h.view()
  fast_entry = h.entry(view, fast, chunk=60)
  assert fast_entry.compute_start == 20
  h.apply(prefill=(fast_entry,))
  h.step_done()
  view = h.view()
  (running_slow, running_fast) = view.running
  assert running_slow.context_tokens == running_fast.context_tokens == 80
  assert h.controller.stats.taken_over_tokens == 60
  used = h.controller.tiers.device.used_pages
  assert used == 20 + 2 * 5  # the first's own pages for those 60 tokens are free again
  h.prefill(slow, fast)
  h.step_done()
  assert h.computed == {slow: [(0, 20), (80, 100)], fast: [(20, 80), (80, 100)]}


def test_a_chunk_loads_what_has_come_to_the_host_meanwhile():
  h = Harness(device_pages=64, host_pages=64)
  slow, fast = h.add(LONG), h.add(LONG)
  h.prefill(slow, chunk=20)
  h.step_done()
  h.prefill(fast)
  h.step_done()
  h.finish(fast)
  h.flush()
  h.transfers_done()
  for slots in h.controller.tree.evict(0, 99):
    h.controller.tiers.device.free(slots)
  view = h.view()
  (running,) = view.running
  assert [(s.state, s.tokens) for s in running.path] == [("host", 76)]
  free = view.free_pages
  node_id = running.path[0].node_id
  applied = h.apply(prefill=(Prefill(slow, (Load(node_id, 40),), 60, 100),))
  (load,) = applied.work.loads
  assert load.tokens == 40
  assert h.controller.tiers.device.free_pages == free  # loaded into its own pages
  h.step_done()
  assert h.computed[slow] == [(0, 20), (60, 100)]
  assert h.held(LONG) == (100, 100)


def on_the_host_beside_a_chunk():
  """LONG is on the host; 20 tokens of it are computed for the first request, the second waits."""
  h = Harness(device_pages=64, host_pages=64)
  slow, fast, third = h.add(LONG), h.add(LONG), h.add(LONG)
  h.prefill(slow, chunk=20)
  h.step_done()
  h.prefill(fast)
  h.step_done()
  h.finish(fast)
  h.flush()
  h.transfers_done()
  for slots in h.controller.tree.evict(0, 99):
    h.controller.tiers.device.free(slots)
  return h, slow, third


def test_a_chunk_goes_on_behind_a_load_of_another():
  h, slow, third = on_the_host_beside_a_chunk()
  applied = h.prefill(third, park=(third,))
  (load,) = applied.work.loads
  (running, _) = h.view().running
  assert [(s.state, s.tokens) for s in running.path] == [("loading", 76)]
  applied = h.prefill(slow)
  assert applied.work.prefills[0].start == 96
  assert applied.work.prefills[0].waits_for == (load.transfer_id,)
  h.step_done()
  h.view()
  h.apply(resume=(third,))
  h.step_done()


def test_a_view_during_a_step_leaves_the_pages_that_the_step_writes():
  """A load brings what a running chunk computes; the next plan is made meanwhile."""
  h, slow, third = on_the_host_beside_a_chunk()
  h.prefill(third, park=(third,))
  h.apply(prefill=(Prefill(slow, (), 20, 60),))  # without a look at what is loading
  h.load_done()
  free = h.view().free_pages
  assert h.view().running[0].context_tokens == 20
  h.step_done()
  assert h.view().running[0].context_tokens == 96
  assert h.controller.tiers.device.free_pages > free
  h.prefill(slow, resume=(third,))
  h.step_done()
  assert h.computed[slow] == [(0, 20), (20, 60), (96, 100)]


def test_a_locked_span_is_marked():
  h = Harness(device_pages=64)
  runner = h.add(tokens((0, 41)), outputs=9)
  h.prefill(runner)
  h.step_done()
  h.flush()
  h.transfers_done()
  sharer = h.add(tokens((0, 41)))
  assert [span.locked for span in h.waiting(sharer).path] == [True]
  h.finish(runner)
  assert [span.locked for span in h.waiting(sharer).path] == [False]


def test_an_evicted_node_that_somebody_waits_on_is_in_queue_again():
  h = Harness(device_pages=12, host_pages=0)
  h.run(tokens((0, 41)))
  waiting = h.add(tokens((0, 41)))
  assert h.path(waiting) == [("device", 40)]
  h.run(tokens((200, 33)))
  assert h.path(waiting) == [("device", 12), ("in_queue", 28)]


def test_decode_goes_on_beside_a_new_child_of_its_node():
  h = Harness(page_size=1, device_pages=64, host_pages=0)
  request = h.add(tokens((0, 5)), outputs=9)
  h.prefill(request)
  h.step_done()
  for _ in range(3):
    h.view()
    h.apply(decode=(request,))
    h.step_done()
  h.view()
  context = np.array(h.contexts[request], np.int32)
  inside = h.add(np.concatenate([context[:6], tokens((500, 3))]))  # splits the growing node
  behind = h.add(np.concatenate([context[:8], tokens((600, 3))]))  # hangs below it
  for _ in range(5):
    h.view()
    h.apply(decode=(request,))
    h.step_done()
  h.view()
  h.finish(request)
  assert h.held(np.array(h.contexts[request], np.int32))[0] == 13
  h.prefill(inside, behind)
  h.step_done()
  assert h.hits(inside) == (6, 0)
  assert h.hits(behind) == (8, 0)


def test_a_split_of_a_growing_node_leaves_the_cache_its_own_slots():
  """The page table of the request that grew it is used for other pages after a preemption."""
  h = Harness(page_size=1, device_pages=64, host_pages=0)
  request = h.add(tokens((0, 5)), outputs=9)
  h.prefill(request)
  h.step_done()
  for _ in range(4):
    h.view()
    h.apply(decode=(request,))
    h.step_done()
  h.view()
  context = np.array(h.contexts[request], np.int32)
  inside = h.add(np.concatenate([context[:7], tokens((500, 3))]))  # splits the growing node
  h.view()
  h.apply(preempt=(request,))
  h.view()
  # A plan may compute a prompt again although all of it is there.
  h.apply(prefill=(Prefill(request, (), 0, len(context)),))
  h.step_done()
  h.prefill(inside)
  h.step_done()
  assert h.hits(inside) == (7, 0)


def test_a_prompt_computed_again_leaves_the_cache_its_own_slots():
  """A preempted request takes other pages into the page table that its first ones stood in."""
  h = Harness(device_pages=32, host_pages=0)
  request = h.add(tokens((0, 17)))
  h.prefill(request)
  h.step_done()
  h.view()
  h.apply(preempt=(request,))
  h.view()
  h.apply(prefill=(Prefill(request, (), 0, len(h.contexts[request])),))
  h.step_done()
  h.finish(request)
  again = h.run(tokens((0, 17)))  # reads them
  assert h.hits(again) == (16, 0)


def test_prompts_of_every_alignment():
  for page_size in (1, 3, 4):
    h = Harness(page_size=page_size, device_pages=80)
    for length in range(1, 14):
      for _ in range(2):
        h.run(tokens((0, length)), outputs=3)
    assert h.free_pages() == (80, 64)


def test_every_split_point_of_a_prompt():
  """Compute [0, s), then [s, n): same context, same pages in the tree."""
  for split in range(4, 20, 4):
    h = Harness()
    request = h.add(tokens((0, 21)))
    h.prefill(request, chunk=split)
    h.step_done()
    h.prefill(request)
    h.step_done()
    assert h.computed[request] == [(0, split), (split, 21)]
    h.finish(request)
    assert h.held(tokens((0, 21)))[0] == 20


def test_a_thousand_aborts_at_random_moments():
  rng = np.random.default_rng(0)
  h = Harness(page_size=2, device_pages=100, host_pages=100, checks=False)
  h.run(tokens((0, 21)))
  before = h.free_pages()
  live: list[int] = []
  for round_ in range(1000):
    start = int(rng.integers(0, 3)) * 100
    live.append(h.add(tokens((start, int(rng.integers(1, 40)))), outputs=int(rng.integers(1, 9))))
    for _ in range(int(rng.integers(0, 4))):
      _random_step(h, rng)
    if round_ % 25 == 0:
      h.controller.check()
    if len(live) > 6 or rng.random() < 0.7:
      h.abort(live.pop(int(rng.integers(len(live)))))
  while live:
    h.abort(live.pop())
  if h.step is not None:
    h.step_done()
  h.flush()
  h.transfers_done()
  h.controller.check()
  assert h.free_pages() == before
  assert h.controller.stats.aborted == 1000


def _random_step(h: Harness, rng: np.random.Generator) -> None:
  if h.loads and rng.random() < 0.5:
    h.load_done(list(h.loads)[rng.integers(len(h.loads))])
  if h.backups and rng.random() < 0.5:
    h.backup_done(list(h.backups)[rng.integers(len(h.backups))], ok=bool(rng.random() < 0.9))
  if h.step is not None:
    if rng.random() < 0.7:
      h.step_done()
    return
  view = h.view()
  prefills = [
    h.entry(view, r.request_id, chunk=int(rng.integers(1, 30)))
    for r in (*view.waiting, *view.running)
    if getattr(r, "phase", "prefill") == "prefill" and rng.random() < 0.5
  ]
  named = {entry.request_id for entry in prefills}
  park = [e.request_id for e in prefills if e.loads and rng.random() < 0.5]
  running = view.running
  deferred = [
    Deferred(r.request_id, "in_flight", tuple(s.node_id for s in r.path if s.state == "in_flight"))
    for r in view.waiting
    if r.request_id not in named
  ]
  h.apply(
    prefill=tuple(prefills),
    park=tuple(park),
    resume=tuple(r.request_id for r in running if r.phase == "parked" and rng.random() < 0.5),
    decode=tuple(r.request_id for r in running if r.phase == "decode"),
    deferred=tuple(deferred),
  )
