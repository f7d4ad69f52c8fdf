"""A state machine drives tree and controller against a page-by-page model.

The model keeps sets of pages, each named by all tokens up to its end. It knows what must come into
a tier, what must not leave it, and how many pages must leave; which of the old ones leave is the
controller's choice, as long as what stays is closed under prefixes. Contents are checked by the
harness, accounting by `controller.check()`, both after every step.
"""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from strata_jax.controller.request_state import RequestState
from strata_jax.radix_tree import DEVICE, HOST
from strata_jax.scheduler.views import Deferred, Load, Prefill, Refused, SchedulerView
from strata_jax.tree_checks import walk
from tests.controller_harness import HERE, Harness

RANDOMS = st.randoms(use_true_random=True)  # seeded: a plan draws too much for anything else
Page = tuple  # (salt, all tokens up to the page's end)


class CacheMachine(RuleBasedStateMachine):
  @initialize(
    page_size=st.sampled_from([2, 1, 4]),
    device_pages=st.sampled_from([12, 20, 32, 48]),
    host_pages=st.sampled_from([120, 60, 120, 14, 6, 0]),
    write_policy=st.sampled_from(
      ["write_through", "write_through", "write_back", "write_through_selective", "none"]
    ),
  )
  def start(self, page_size, device_pages, host_pages, write_policy):
    self.h = Harness(
      page_size=page_size,
      device_pages=device_pages,
      host_pages=host_pages,
      write_policy=write_policy,
      decode_steps=3,
    )
    self.device: set[Page] = set()  # loading ones included
    self.loading: set[Page] = set()
    self.host: set[Page] = set()  # ready ones
    self.backing: set[Page] = set()  # host slots that are being filled
    self.look()

  # What is.

  def pages(self, salt: str, ids, end: int | None = None) -> list[Page]:
    """The whole pages of `ids[:end]`."""
    end = len(ids) if end is None else end
    size = self.h.page_size
    return [(salt, tuple(ids[:stop])) for stop in range(size, end + 1, size)]

  def look(self) -> None:
    """Reads what the tree holds into the model's sets."""
    self.device, self.loading, self.host, self.backing = set(), set(), set(), set()
    for (salt, _), root in self.h.controller.tree._roots.items():
      pending = [(child, ()) for child in root.children.values()]
      while pending:
        node, before = pending.pop()
        ids = before + tuple(node.tokens.tolist())
        named = set(self.pages(salt, ids)[node.start // self.h.page_size :])
        if node.slots[DEVICE] is not None:
          self.device |= named
          if node.transfers[DEVICE] is not None:
            self.loading |= named
        if node.slots[HOST] is not None:
          target = self.host if node.transfers[HOST] is None else self.backing
          target |= named
        pending.extend((child, ids) for child in node.children.values())

  def running(self) -> dict[int, RequestState]:
    return self.h.controller._running

  def salt(self, request_id: int) -> str:
    return self.h.controller._states[request_id].request.salt

  def context(self, request_id: int) -> list[Page]:
    """The whole pages of a running request's context."""
    state = self.running()[request_id]
    ids = self.h.contexts[request_id]
    return self.pages(self.salt(request_id), ids, state.context_tokens)

  def in_use(self) -> set[Page]:
    used = set(self.loading)
    for request_id, state in self.running().items():
      pages = self.context(request_id)
      used.update(pages[: state.leaf.end // self.h.page_size])
    return used

  def compare(self, gained: set[Page]) -> None:
    """The device has gained exactly these pages and lost none."""
    before = self.device
    self.look()
    assert self.device <= before | gained, "pages from nowhere"
    assert gained <= self.device, "pages that must be there are not"
    assert before <= self.device, "pages were evicted although nothing was asked for"
    size = self.h.page_size
    for pages in (self.device, self.host):
      assert all((s, ids[:-size]) in pages for s, ids in pages if len(ids) > size), "a hole"

  # Requests.

  @rule(pick=RANDOMS, count=st.integers(1, 4))
  def add(self, pick, count):
    for _ in range(count):
      self.add_one(pick)

  def add_one(self, pick: random.Random) -> None:
    """A prompt that shares a run with many others, and maybe a second one."""
    shared = pick.choice((0, 100)) + np.arange(pick.randint(2, 22), dtype=np.int32)
    own = 500 + 10 * pick.randint(0, 2) + np.arange(pick.randint(0, 5), dtype=np.int32)
    prompt = np.concatenate([shared, own]).astype(np.int32)
    outputs, salt = pick.randint(1, 6), pick.choice(("", "", "", "s"))
    refusal = self.h.try_add(prompt, outputs, salt=salt)
    pages = -(-(len(prompt) + outputs - 1) // self.h.page_size)
    fits = pages <= self.h.controller.cache.device_pages
    assert (refusal is None) == (len(prompt) > 0 and fits)
    self.compare(set())

  @rule(pick=RANDOMS)
  def abort(self, pick):
    live = [i for i, state in self.h.controller._states.items() if not state.over]
    if not live:
      return
    request_id = pick.choice(live)
    state = self.running().get(request_id)
    gained = set() if state is None or state.in_step else set(self.context(request_id))
    self.h.abort(request_id)
    self.compare(gained)

  @rule(pick=RANDOMS)
  def finish(self, pick):
    done = [
      request_id
      for request_id, state in self.running().items()
      if state.phase == "decode" and not state.in_step and not state.over
    ]
    if not done:
      return
    state = self.running()[done[0]]
    self.finish_one(done[0], pick.choice([None, state.outputs, max(state.outputs - 2, 0)]))

  def finish_one(self, request_id: int, outputs: int | None) -> None:
    end = self.running()[request_id].context_tokens
    if outputs is not None:
      end = min(end, self.h.prompts[request_id] + outputs)
    gained = set(self.pages(self.salt(request_id), self.h.contexts[request_id], end))
    self.h.finish(request_id, outputs)
    self.compare(gained)

  # Plans.

  @precondition(lambda self: self.h.step is None)
  @rule(pick=RANDOMS, greed=st.floats(0.2, 1.0))
  def plan(self, pick, greed):
    gained = set()
    for request_id, state in self.running().items():
      if state.phase == "decode":
        gained.update(self.context(request_id))
    view = self.h.view()  # publishes decoded pages
    self.compare(gained)
    self.check_view(view)
    fields = self.draw_plan(view, pick, greed)
    preempted = fields["preempt"]
    before_free = self.h.controller.tiers.device.free_pages
    released = 0
    if preempted:
      self.h.apply(preempt=preempted)
      released = self.h.controller.tiers.device.free_pages - before_free
      assert released >= 0
      self.compare(set())
      view = self.h.view()
      fields = self.draw_plan(view, pick, greed) | {"preempt": ()}
    free = self.h.controller.tiers.device.free_pages
    hits = {r.request_id: self.hit(r.request_id, r.path) for r in view.waiting}
    applied = self.h.apply(**fields)
    work = applied.work
    gained, needed = set(), 0
    if work is not None:
      for load in work.loads:
        needed_by_load = len(load.device_slots)
        own = self.running()[load.request_id]
        fresh = any(a.request_id == load.request_id for a in applied.admitted)
        needed += needed_by_load if fresh else 0
        assert own.phase in ("prefill", "parked")
    for admission in applied.admitted:
      state = self.running()[admission.request_id]
      start = state.prompt_tokens - admission.compute_tokens
      needed += -(-state.prompt_tokens // self.h.page_size) - start // self.h.page_size
      if not admission.readmitted:
        device, host = hits[admission.request_id]
        total = admission.device_hit_tokens + admission.host_hit_tokens
        assert total == start
        assert admission.device_hit_tokens == min(device, start)
        assert total <= device + host
    for request_id in fields["decode"]:
      if request_id not in applied.stale:
        state = self.running()[request_id]
        had = -(-state.context_tokens // self.h.page_size)
        needed += max(state.page_count - had, 0)
    actually_free = self.h.controller.tiers.device.free_pages
    old = self.device
    self.look()
    gained = self.device - old
    assert gained <= self.loading, "only loads bring pages at once"
    gone = old - self.device
    assert not gone & self.in_use(), "pages in use were evicted"
    assert len(gone) <= max(needed - free, 0), "more was evicted than was missing"
    if not applied.stale and not applied.preempted and needed > free:
      assert actually_free == 0 or len(gone) == needed - free

  @rule(pick=RANDOMS, count=st.integers(1, 25))
  def serve(self, pick, count):
    """Everything in a likely mixture, so that the pools are full and in motion most of the time."""
    for _ in range(count):
      what = pick.choices(
        (self.add_one, self.plan, self.step_done, self.load_done, self.backup_done, self.abort),
        (3, 5, 5, 2, 4, 0.3),
      )[0]
      if what == self.step_done:
        if self.h.step is not None:
          self.step_done()
      elif what == self.plan:
        if self.h.step is None:
          self.plan(pick, pick.uniform(0.2, 1.0))
      elif what == self.backup_done:
        if self.h.backups:
          self.backup_done(pick, pick.random() < 0.9)
      elif what != self.load_done or self.h.loads:
        what(pick)

  def draw_plan(self, view: SchedulerView, pick: random.Random, greed: float) -> dict:
    entries: list[Prefill] = []
    loaded: set[int] = set()
    deferred = []
    room = view.free_pages + view.evictable_pages
    for request in (*view.running, *view.waiting):
      if getattr(request, "phase", "prefill") != "prefill":
        continue
      if pick.random() > greed:
        nodes = tuple(s.node_id for s in request.path if s.state in ("in_flight", "in_queue"))
        if not hasattr(request, "phase") and nodes:
          deferred.append(Deferred(request.request_id, "in_flight", nodes))
        continue
      if not hasattr(request, "phase"):
        pages = request.prompt_tokens // self.h.page_size + 1
        if pages > room and pick.random() < 0.9:  # some entries do not fit
          continue
        room -= pages
      entries.append(self.draw_entry(request, loaded, pick))
    named = {entry.request_id for entry in entries}
    parkable = [e.request_id for e in entries if e.loads]
    decoding = [r for r in view.running if r.phase == "decode"]
    waiting = [r.request_id for r in view.waiting if r.request_id not in named]
    refused = [i for i in waiting if pick.random() < 0.03]
    return {
      "prefill": tuple(entries),
      "park": tuple(i for i in parkable if pick.random() < 0.4),
      "resume": tuple(
        r.request_id for r in view.running if r.phase == "parked" and pick.random() < 0.6
      ),
      "decode": tuple(r.request_id for r in decoding if pick.random() < 0.9),
      "decode_steps": pick.choice([1, 1, 2, 3]),
      "preempt": tuple(
        r.request_id for r in view.running if r.phase != "parked" and pick.random() < 0.05
      ),
      "refused": tuple(Refused(i, "drawn") for i in refused),
      "deferred": tuple(d for d in deferred if d.request_id not in refused),
      "postponed": tuple(i for i in waiting if i not in refused and pick.random() < 0.2),
    }

  def draw_entry(self, request, loaded: set[int], pick: random.Random) -> Prefill:
    size = self.h.page_size
    start = getattr(request, "context_tokens", 0)
    prompt = start + sum(span.tokens for span in request.path) + request.tail_tokens
    loads = []
    for span in request.path:
      if span.state == "host" and span.node_id not in loaded:
        if pick.random() < 0.2:
          break
        part = span.tokens
        if pick.random() < 0.3:
          part = pick.randint(1, span.tokens // size) * size
        loads.append(Load(span.node_id, part))
        start += part
        loaded.add(span.node_id)
        if part < span.tokens:
          break
      elif span.state in HERE or (span.node_id in loaded and pick.random() < 0.8):
        start += span.tokens
      else:
        break
    pages = pick.randint(1, 12)
    end = start + pages * size
    return Prefill(request.request_id, tuple(loads), start, min(end, prompt))

  def hit(self, request_id: int, path) -> tuple[int, int]:
    """Tokens of a waiting request that the model has on the device, and then on host."""
    size = self.h.page_size
    ids = self.h.contexts[request_id]
    cap = (len(ids) - 1) // size * size
    device = host = 0
    for page in self.pages(self.salt(request_id), ids, cap):
      if page in self.device and page not in self.loading and not host:
        device += size
      elif page in self.loading or page in self.host:
        host += size
      else:
        break
    return device, host

  def check_view(self, view: SchedulerView) -> None:
    """Every page of every path has the state that the model gives it."""
    size = self.h.page_size
    computing: set[Page] = set()
    for request in view.running:
      if request.phase != "decode":
        ids = self.h.contexts[request.request_id]
        state = self.running()[request.request_id]
        cap = (state.prompt_tokens - 1) // size * size
        computing.update(
          self.pages(self.salt(request.request_id), ids, cap)[state.context_tokens // size :]
        )
    for request in (*view.waiting, *view.running):
      ids = self.h.contexts[request.request_id]
      pages = self.pages(self.salt(request.request_id), ids)
      at = getattr(request, "context_tokens", 0) // size
      for span in request.path:
        for page in pages[at : at + span.tokens // size]:
          assert span.state == self.state_of(page, computing), f"{page} in {span}"
        at += span.tokens // size
    in_nodes = {node.id for node in walk(self.h.controller.tree) if node.state == "in_flight"}
    assert set(view.in_flight) == in_nodes

  def state_of(self, page: Page, computing: set[Page]) -> str:
    if page in self.device:
      return "loading" if page in self.loading else "device"
    if page in self.host:
      return "host"
    return "in_flight" if page in computing else "in_queue"

  # Events.

  @precondition(lambda self: self.h.step is not None)
  @rule()
  def step_done(self):
    step = self.h.step
    states = {p.request_id: self.running()[p.request_id] for p in (*step.prefills, *step.decodes)}
    over = {i for i, state in states.items() if state.over}
    keep = {i: state.keep_tokens for i, state in states.items()}
    salts = {i: state.request.salt for i, state in states.items()}
    ready = set(self.loading)
    self.h.step_done()  # ends the loads that it waits for
    gained: set[Page] = set()
    for prefill in step.prefills:
      end = prefill.start + len(prefill.token_ids)
      gained.update(self.pages(salts[prefill.request_id], self.h.contexts[prefill.request_id], end))
    for decode in step.decodes:
      if decode.request_id in over:
        end = min(keep[decode.request_id], decode.position + step.decode_steps)
        ids = self.h.contexts[decode.request_id]
        gained.update(self.pages(salts[decode.request_id], ids, end))
    self.compare(gained)
    assert self.loading <= ready
    for request_id, state in list(self.running().items()):
      if state.phase == "decode" and state.length >= state.max_length:
        self.finish_one(request_id, state.max_length - self.h.prompts[request_id])

  @precondition(lambda self: self.h.loads)
  @rule(pick=RANDOMS)
  def load_done(self, pick):
    self.h.load_done(pick.choice(sorted(self.h.loads)))
    self.compare(set())

  @precondition(lambda self: self.h.backups)
  @rule(pick=RANDOMS, ok=st.sampled_from([True, True, True, False]))
  def backup_done(self, pick, ok):
    host, backing = self.host, self.backing
    self.h.backup_done(pick.choice(sorted(self.h.backups)), ok=ok)
    self.compare(set())
    assert host <= self.host <= host | backing, "a finished backup changes what is under way only"
    assert self.backing <= backing

  @rule()
  def flush(self):
    self.h.flush()
    self.compare(set())

  @rule()
  def reset(self):
    controller = self.h.controller
    if controller._states or controller.tiers.transfers:
      with pytest.raises(RuntimeError):
        controller.reset()
      self.compare(set())

  def teardown(self):
    """Whatever happened: when all are gone, every page is free or can be made so."""
    if not hasattr(self, "h"):
      return
    for request_id in list(self.h.controller._states):
      self.h.abort(request_id)
    if self.h.step is not None:
      self.h.step_done()
    self.h.transfers_done()
    self.h.flush()
    self.h.transfers_done()
    cache = self.h.controller.cache
    assert self.h.free_pages() == (cache.device_pages, cache.host_pages)
    for node in walk(self.h.controller.tree):
      assert node.slots[DEVICE] is not None or node.slots[HOST] is not None
    self.h.controller.reset()
    assert not self.h.controller.tree.nodes


CacheMachine.TestCase.settings = settings(
  max_examples=60, stateful_step_count=60, deadline=None, print_blob=False
)
TestCacheMachine = pytest.mark.slow(CacheMachine.TestCase)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_seeded_runs(seed):
  """The same machine on long runs, which hypothesis draws seldom."""
  pick = random.Random(seed)
  machine = CacheMachine()
  machine.start(
    page_size=pick.choice((1, 2, 4)),
    device_pages=pick.choice((12, 20, 32, 48)),
    host_pages=(120, 40)[seed % 2],
    write_policy=("write_through", "write_back", "write_through_selective")[seed % 3],
  )
  for _ in range(8):
    machine.serve(pick, 25)
    machine.flush()
  machine.teardown()
