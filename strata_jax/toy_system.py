"""A pure little serving system that drives a policy round by round: no tokens, slots, I/O or clock.

It holds what a policy can see and nothing else: prompts are sequences of named blocks, a device of
so many pages, an endless host tier under write-through. One round is view -> plan -> what the plan
says. For tests of policies (`strata_jax.testing.check_policy`); the real thing is the
CacheController, which counts deferrals, postponements and bypasses in the same way.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, cast

from strata_jax.scheduler import views
from strata_jax.scheduler.round import pages_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyRequest:
  """A prompt of named blocks: equal names at the same place after equal blocks are equal tokens."""

  request_id: int
  blocks: tuple[tuple[str, int], ...]  # (name, tokens: whole pages)
  tail_tokens: int = 1
  output_tokens: int = 1


class _Node:
  __slots__ = ("depth", "host", "loading", "locks", "node_id", "on_device", "tokens", "used")

  def __init__(self, node_id: int, tokens: int, depth: int) -> None:
    self.node_id = node_id
    self.tokens = tokens
    self.depth = depth
    self.on_device = False
    self.host = False
    self.loading = 0  # tokens left
    self.locks = 0
    self.used = -1


@dataclasses.dataclass
class _Live:
  request: ToyRequest
  order: int
  nodes: list[_Node]
  phase: str = "waiting"
  admitted: int = 0
  position: int = 0  # tokens computed or hit
  end: int = 0  # of its parked chunk
  generated: int = 0
  private_pages: int = 0
  locked: list[_Node] = dataclasses.field(default_factory=list)
  needs: list[_Node] = dataclasses.field(default_factory=list)  # loads that its compute waits for
  progress: int = 0
  deferrals: int = 0
  postponements: int = 0
  bypasses: int = 0
  front: bool = False
  after: tuple[int, ...] = ()
  seen: dict[int, int] = dataclasses.field(default_factory=dict)
  passed_rounds: int = 0  # rounds in which only later arrivals were admitted, not deferred

  @property
  def prompt_tokens(self) -> int:
    return sum(n.tokens for n in self.nodes) + self.tail_tokens

  @property
  def tail_tokens(self) -> int:
    return self.request.tail_tokens + self.generated

  def spans(self) -> Iterator[tuple[_Node, int, int]]:
    """Nodes with their start and end in the prompt."""
    at = 0
    for node in self.nodes:
      yield node, at, at + node.tokens
      at += node.tokens


class ToySystem:
  """See the module. `finished`, `refused` and `aborted` hold request ids."""

  def __init__(
    self,
    budgets: views.Budgets,
    *,
    device_pages: int,
    load_tokens_per_round: int = 1 << 30,
    costs: views.Costs = views.Costs(),
  ) -> None:
    self.budgets = budgets
    self.capacity_pages = device_pages
    self.load_tokens_per_round = load_tokens_per_round
    self.costs = costs
    self.round = 0
    self.live: dict[int, _Live] = {}
    self.finished: list[int] = []
    self.refused: list[int] = []
    self.aborted: list[int] = []
    self.computed_tokens = 0
    self.loaded_tokens = 0
    self.longest_passed_rounds = 0
    self.longest_deferrals = 0
    self._chains: dict[tuple[str, ...], list[_Node]] = {}
    self._next_node = 0
    self._next_order = 0

  def add(self, request: ToyRequest, *, cached: str = "") -> None:
    """A request arrives. `cached`: "device" or "host", where its blocks are already."""
    nodes: list[_Node] = []
    key: tuple[str, ...] = ()
    for name, tokens in request.blocks:
      if tokens % self.budgets.page_size:
        raise ValueError(f"block {name!r}: expected whole pages, got {tokens} tokens")
      key = (*key, name)
      if key not in self._chains:
        self._chains[key] = [self._new_node(tokens, len(key))]
      nodes.extend(self._chains[key])
    if cached:
      computed = self._producers()
      for node in nodes:
        if node.node_id in computed:  # nobody has it yet, nor what comes after it
          break
        node.host = True
        node.on_device = node.on_device or cached == "device"
    self.live[request.request_id] = _Live(request, self._next_order, nodes)
    self._next_order += 1

  def abort(self, request_id: int) -> None:
    """Its client gave up; finished chunks stay in the cache."""
    live = self.live.pop(request_id)
    self._release(live)
    self.aborted.append(request_id)
    self._clean()

  def step(self, policy: Callable[[views.SchedulerView], views.StepPlan]) -> views.StepPlan:
    """One round."""
    view = self.view()
    plan = policy(view)
    self.apply(view, plan)
    return plan

  def view(self) -> views.SchedulerView:
    producers = self._producers()
    waiting = sorted(self._in("waiting"), key=lambda live: live.order)
    running = sorted(
      (live for live in self.live.values() if live.phase != "waiting"),
      key=lambda live: (live.admitted, live.order),
    )
    parked = [live for live in running if live.phase == "parked"]
    nodes, page_size = list(self._all_nodes()), self.budgets.page_size
    held = sum(live.private_pages for live in running)
    held += sum(n.tokens // page_size for n in nodes if n.on_device)
    evictable = sum(
      n.tokens // page_size for n in nodes if n.on_device and not n.locks and not n.loading
    )
    loads = {n.node_id: n.loading for n in nodes if n.loading}
    return views.SchedulerView(
      version=self.round,
      waiting=tuple(self._waiting_view(live, producers) for live in waiting),
      running=tuple(self._running_view(live, producers) for live in running),
      parked=views.ParkedView(
        tuple(live.request.request_id for live in parked),
        sum({n.node_id: n.loading for live in parked for n in live.needs}.values()),
        sum(live.end - live.position for live in parked),
      )
      if parked
      else None,
      in_flight={
        node_id: views.Producer(owner, left) for node_id, (owner, left) in producers.items()
      },
      loading=loads,
      free_pages=self.capacity_pages - held,
      evictable_pages=evictable,
      capacity_pages=self.capacity_pages,
      budgets=self.budgets,
      costs=self.costs,
      now_s=float(self.round),
    )

  def apply(self, view: views.SchedulerView, plan: views.StepPlan) -> None:
    """Does what the plan says; raises AssertionError where it asks for what is not there."""
    self.round += 1
    for request_id in plan.preempt:
      live = self.live[request_id]
      self._release(live)
      live.phase, live.position = "waiting", 0
    for request_id, _ in plan.refused:
      self._release(self.live.pop(request_id))
      self.refused.append(request_id)
    admitted = [e for e in plan.prefill if self.live[e.request_id].phase == "waiting"]
    for entry in plan.prefill:
      self._begin(entry)
    for request_id in plan.decode:
      live = self.live[request_id]
      pages = self._next_pages(live, plan.decode_steps)
      live.private_pages += pages
    self._make_room()
    for entry in plan.prefill:
      if entry.request_id in plan.park:
        self.live[entry.request_id].phase = "parked"
      else:
        self._compute(self.live[entry.request_id])
    for request_id in plan.resume:
      live = self.live[request_id]
      live.phase = "prefill"
      self._compute(live)
    self._count(view, plan, admitted)
    self._advance_loads()
    for request_id in plan.decode:
      live = self.live[request_id]
      live.generated += plan.decode_steps
    for live in list(self.live.values()):
      if live.phase == "decode" and live.generated >= live.request.output_tokens:
        self._release(live)
        del self.live[live.request.request_id]
        self.finished.append(live.request.request_id)
    self._clean()

  # Views

  def _path(self, live: _Live, producers: dict[int, tuple[int, int]]) -> tuple[views.Span, ...]:
    spans = []
    for node, start, end in live.spans():
      if end <= live.position:
        continue
      tokens = end - max(start, live.position)
      if node.loading:
        state = "loading"
      elif node.on_device:
        state = "device"
      elif node.host:
        state = "host"
      elif node.node_id in producers:
        state = "in_flight"
      else:
        state = "in_queue"
      spans.append(views.Span(node.node_id, tokens, state, node.locks > 0))
    return tuple(spans)

  def _waiting_view(self, live: _Live, producers: dict[int, tuple[int, int]]) -> views.RequestView:
    return views.RequestView(
      request_id=live.request.request_id,
      arrival_s=float(live.order),
      path=self._path(live, producers),
      tail_tokens=live.tail_tokens,
      output_reserve_tokens=live.request.output_tokens - live.generated,
      deferrals=live.deferrals,
      postponements=live.postponements,
      bypasses=live.bypasses,
      front=live.front,
      after=live.after,
    )

  def _running_view(self, live: _Live, producers: dict[int, tuple[int, int]]) -> views.RunningView:
    prefills = live.phase == "prefill"
    return views.RunningView(
      request_id=live.request.request_id,
      phase=cast(Any, live.phase),
      arrival_s=float(live.order),
      context_tokens=self._context(live),
      remaining_prefill_tokens=0 if live.phase == "decode" else live.prompt_tokens - live.position,
      path=self._path(live, producers) if prefills else (),
      tail_tokens=min(live.tail_tokens, live.prompt_tokens - live.position) if prefills else 0,
      next_pages=self._next_pages(live, 1) if live.phase == "decode" else 0,
      output_tokens_left=live.request.output_tokens - live.generated,
      load_tokens_left=sum(n.loading for n in live.needs) if live.phase == "parked" else None,
      held_pages=live.private_pages
      + sum(n.tokens // self.budgets.page_size for n in live.locked if n.locks == 1),
    )

  def _context(self, live: _Live) -> int:
    if live.phase == "decode":  # the last token's KV is not written yet
      return live.prompt_tokens - 1
    return live.position

  def _next_pages(self, live: _Live, steps: int) -> int:
    context, page_size = self._context(live), self.budgets.page_size
    return pages_of(context + steps, page_size) - pages_of(context, page_size)

  def _producers(self) -> dict[int, tuple[int, int]]:
    """In-flight nodes: (who computes it, tokens until it is complete)."""
    found: dict[int, tuple[int, int]] = {}
    active = (live for live in self.live.values() if live.phase in ("prefill", "parked"))
    for live in sorted(active, key=lambda live: (live.admitted, live.order)):
      for node, _, end in live.spans():
        if end > live.position and not (node.on_device or node.host):
          found.setdefault(node.node_id, (live.request.request_id, end - live.position))
    return found

  # Plans

  def _begin(self, entry: views.Prefill) -> None:
    """Locks what the entry reads, starts its loads, and takes pages for the rest of its prompt."""
    live = self.live[entry.request_id]
    for node_id, tokens in entry.loads:
      node = next(n for n in live.nodes if n.node_id == node_id)
      assert node.host, f"request {entry.request_id} loads node {node_id}, which is not on host"
      assert not node.on_device, f"node {node_id} is loaded twice"
      if tokens < node.tokens:
        self._split(node, tokens)
      node.on_device, node.loading = True, node.tokens
      self.loaded_tokens += node.tokens
    first = live.phase == "waiting"
    before = live.position
    for node, start, end in live.spans():
      if before <= start and end <= entry.compute_start:
        assert node.on_device, f"node {node.node_id} is not there before compute_start"
        self._lock(live, node)
        if node.loading:
          live.needs.append(node)
        if not first:
          live.private_pages -= node.tokens // self.budgets.page_size
    if first:
      live.admitted, live.phase = self.round, "prefill"
      live.front, live.after, live.seen = False, (), {}
      rest = live.prompt_tokens - entry.compute_start
      live.private_pages = pages_of(rest, self.budgets.page_size)
    live.position, live.end = entry.compute_start, entry.compute_end

  def _compute(self, live: _Live) -> None:
    self.computed_tokens += live.end - live.position
    live.position = live.end
    live.progress += 1
    for node in live.needs:
      node.loading = 0  # gated layer by layer: the compute waited for the rest
    live.needs.clear()
    self._publish(live)
    if live.position == live.prompt_tokens:
      live.phase = "decode"
      live.generated += 1  # the first token, whose KV is not written yet

  def _publish(self, live: _Live) -> None:
    for node, _, end in live.spans():
      if end <= live.position and node not in live.locked and not node.on_device:
        node.on_device = node.host = True
        live.private_pages -= node.tokens // self.budgets.page_size
        self._lock(live, node)

  def _take_over(self, live: _Live) -> None:
    """What others have computed by now need not be computed again."""
    for node, start, end in live.spans():
      if start == live.position and node.on_device and node not in live.locked:
        live.private_pages -= node.tokens // self.budgets.page_size
        self._lock(live, node)
        live.position = end

  def _advance_loads(self) -> None:
    left = self.load_tokens_per_round
    parked = {n.node_id for live in self._in("parked") for n in live.needs}
    for node in self._all_nodes():
      if node.loading and node.node_id not in parked:
        node.loading = 0
      elif node.loading:
        part = min(left, node.loading)
        node.loading -= part
        left -= part
    for live in self._in("parked"):
      live.progress += 1

  def _count(
    self, view: views.SchedulerView, plan: views.StepPlan, admitted: list[views.Prefill]
  ) -> None:
    producers = self._producers()
    for request_id, _, waits_on in plan.deferred:
      live = self.live[request_id]
      progressed = any(
        owner not in self.live or self.live[owner].progress > progress
        for owner, progress in live.seen.items()
      )
      if live.after and not progressed:
        live.deferrals += 1
      live.front, live.after = True, waits_on
      owners = {producers[node_id][0] for node_id in waits_on if node_id in producers}
      live.seen = {owner: self.live[owner].progress for owner in owners}
    for request_id in plan.postponed:
      live = self.live[request_id]
      live.postponements += 1
      if not any(node_id in producers for node_id in live.after):
        live.front, live.after, live.seen = False, (), {}
    for request_id in plan.bypassed:
      self.live[request_id].bypasses += 1
    deferred = {d.request_id for d in plan.deferred}
    orders = [self.live[e.request_id].order for e in admitted]
    loading = [self.live[e.request_id].order for e in admitted if e.loads]
    for live in self._in("waiting"):
      full = view.parked is not None and any(n.host and not n.on_device for n in live.nodes)
      passing = loading if full else orders  # no window is full for those who do not load
      if passing and min(passing) > live.order and live.request.request_id not in deferred:
        live.passed_rounds += 1
        self.longest_passed_rounds = max(self.longest_passed_rounds, live.passed_rounds)
      self.longest_deferrals = max(self.longest_deferrals, live.deferrals)

  # Pages

  def _make_room(self) -> None:
    """Evicts least recently used leaves until everything held fits."""
    page_size = self.budgets.page_size
    used = sum(live.private_pages for live in self.live.values())
    used += sum(n.tokens // page_size for n in self._all_nodes() if n.on_device)
    victims = sorted(
      (n for n in self._all_nodes() if n.on_device and not n.locks and not n.loading),
      key=lambda n: (n.used, -n.depth, -n.node_id),
    )
    for node in victims:
      if used <= self.capacity_pages:
        break
      node.on_device = False
      used -= node.tokens // page_size
    assert used <= self.capacity_pages, f"the plan needs {used} pages of {self.capacity_pages}"

  def _lock(self, live: _Live, node: _Node) -> None:
    node.locks += 1
    node.used = self.round
    live.locked.append(node)

  def _release(self, live: _Live) -> None:
    for node in live.locked:
      node.locks -= 1
      node.used = self.round
    live.locked.clear()
    live.needs.clear()
    live.private_pages = 0

  def _split(self, node: _Node, tokens: int) -> None:
    """Cuts a node; the upper part keeps the id."""
    lower = self._new_node(node.tokens - tokens, node.depth)
    lower.on_device, lower.host, lower.used = node.on_device, node.host, node.used
    assert not node.locks, "a locked node is on the device"
    node.tokens = tokens
    for nodes in (*self._chains.values(), *(live.nodes for live in self.live.values())):
      if node in nodes:
        nodes.insert(nodes.index(node) + 1, lower)

  def _new_node(self, tokens: int, depth: int) -> _Node:
    self._next_node += 1
    return _Node(self._next_node, tokens, depth)

  def _clean(self) -> None:
    """Takes transient nodes that nobody wants any more out of the tree."""
    for live in self._in("prefill"):
      self._take_over(live)
    used = {id(node) for live in self.live.values() for node in live.nodes}
    for key, nodes in list(self._chains.items()):
      if not any(n.on_device or n.host or id(n) in used for n in nodes):
        del self._chains[key]

  def _all_nodes(self) -> Iterator[_Node]:
    for nodes in self._chains.values():
      yield from nodes

  def _in(self, phase: str) -> list[_Live]:
    return [live for live in self.live.values() if live.phase == phase]
