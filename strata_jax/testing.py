"""Checks that any policy has to pass, one's own included.

  from strata_jax import testing
  testing.check_policy(my_policy)                          # (view, config) -> plan
  testing.check_policy("my_file.py:my_policy", golden="golden.jsonl")

Each check raises AssertionError with what was expected and what came.
"""

import dataclasses
import pathlib
import random
from collections.abc import Callable, Iterable, Sequence

from strata_jax import recording
from strata_jax.policy_loading import PolicyFunction, load_policy
from strata_jax.scheduler import views
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import Policy
from strata_jax.scheduler.round import pages_of
from strata_jax.toy_system import ToyRequest, ToySystem


def check_policy(
  policy: PolicyFunction | str,
  *,
  config: SchedulerConfig | None = None,
  views_to_try: Sequence[views.SchedulerView] = (),
  golden: str | pathlib.Path | None = None,
  bounded: bool = True,
) -> None:
  """Runs every check below on a policy.

  Args:
    policy: a function of (view, config), a name, or FILE.py:NAME as of the command line.
    config: what it is run with.
    views_to_try: more views than those of the built-in scenarios.
    golden: a record of decisions that it must make again.
    bounded: whether waiting must be bounded; off for policies that say that they starve.

  Raises:
    AssertionError: a check failed.
    ValueError: `policy` or `golden` cannot be loaded.
  """
  config = config or SchedulerConfig()
  bound = _bound(policy, config)
  seen: list[views.SchedulerView] = list(views_to_try)

  def watched(view: views.SchedulerView) -> views.StepPlan:
    seen.append(view)
    plan = bound(view)
    check_plan(view, plan)
    return plan

  check_conservation(watched)
  for scenario in SCENARIOS:
    run_scenario(scenario, watched, config=config, bounded=bounded)
  check_pure(bound, seen[:: max(1, len(seen) // 200)])
  if golden is not None:
    check_golden(bound, golden)


def _bound(policy: PolicyFunction | str, config: SchedulerConfig) -> Policy:
  if isinstance(policy, str):
    return load_policy(policy, config)
  return lambda view: policy(view, config)


def check_pure(policy: Policy, views_to_try: Iterable[views.SchedulerView]) -> None:
  """The same view gives the same plan: again, in another order, as another object; unchanged."""
  tried = list(views_to_try)
  before = [recording.view_to_json(view) for view in tried]
  plans = [policy(view) for view in tried]
  for view, value in zip(tried, before, strict=True):
    assert recording.view_to_json(view) == value, f"the policy changed view {view.version}"
  for index in reversed(range(len(tried))):
    again = policy(tried[index])
    assert again == plans[index], _differs("called again", tried[index], plans[index], again)
  for view, plan in zip(tried, plans, strict=True):
    again = policy(recording.view_from_json(recording.view_to_json(view)))
    assert again == plan, _differs("given an equal view", view, plan, again)


def check_golden(policy: Policy, path: str | pathlib.Path) -> None:
  """The policy makes the recorded decisions again."""
  for view, plan in recording.read_record(path).decisions():
    again = policy(view)
    assert again == plan, _differs(f"given the view of {path}", view, plan, again)


def check_plan(view: views.SchedulerView, plan: views.StepPlan) -> None:
  """A plan that can be carried out: each id once, budgets kept, loads and pages there."""
  waiting = {r.request_id: r for r in view.waiting}
  running = {r.request_id: r for r in view.running}
  budgets = view.budgets
  assert plan.version == view.version, f"expected version {view.version}, got {plan.version}"
  chosen = [entry.request_id for entry in plan.prefill]
  named = [
    *chosen, *plan.decode, *plan.preempt, *plan.resume, *plan.postponed, *plan.bypassed,
    *(d.request_id for d in plan.deferred), *(r.request_id for r in plan.refused),
  ]  # fmt: skip
  doubles = {request_id for request_id in named if named.count(request_id) > 1}
  assert not doubles, f"expected each request in one role, got {sorted(doubles)} in several"
  _subset("prefill", chosen, waiting.keys() | _in_phase(running, "prefill"))
  _subset("decode", plan.decode, _in_phase(running, "decode"))
  _subset("preempt", plan.preempt, running)
  _subset("resume", plan.resume, view.parked.request_ids if view.parked else ())
  _subset("park", plan.park, chosen)
  _subset("bundled", plan.bundled, chosen)
  waits = (*plan.postponed, *plan.bypassed, *(d.request_id for d in plan.deferred))
  _subset("waits", waits, waiting)
  _subset("refused", (r.request_id for r in plan.refused), waiting)
  _check_entries(view, plan, waiting, running)
  for what, entries in (
    ("computed", [e for e in plan.prefill if e.request_id not in plan.park]),
    ("parked", [e for e in plan.prefill if e.request_id in plan.park]),
  ):
    tokens = sum(e.compute_end - e.compute_start for e in entries)
    count = len(entries)
    if what == "computed" and view.parked and plan.resume:
      count += len(plan.resume)
      if set(plan.resume) == set(view.parked.request_ids):
        tokens += view.parked.compute_tokens
    assert tokens <= budgets.step_tokens, f"{what}: {tokens} tokens of {budgets.step_tokens}"
    assert count <= budgets.batch_requests, f"{what}: {count} of {budgets.batch_requests} requests"
  admitted = sum(request_id in waiting for request_id in chosen)
  slots = len(running) - len(plan.preempt) + admitted
  assert not admitted or slots <= budgets.running_requests, f"{slots} running requests"
  assert 1 <= plan.decode_steps <= max(1, budgets.decode_steps), (
    f"{plan.decode_steps} decode steps of {budgets.decode_steps}"
  )


def _check_entries(
  view: views.SchedulerView,
  plan: views.StepPlan,
  waiting: dict[int, views.RequestView],
  running: dict[int, views.RunningView],
) -> None:
  page_size = view.budgets.page_size
  loaded: dict[int, int] = {}
  pinned: set[int] = set()
  free = view.free_pages + view.evictable_pages
  free += sum(running[request_id].held_pages for request_id in plan.preempt)
  needed = sum(running[request_id].next_pages for request_id in plan.decode)
  for entry in plan.prefill:
    request = waiting.get(entry.request_id) or running[entry.request_id]
    offset = request.context_tokens if isinstance(request, views.RunningView) else 0
    at, start, where = offset, entry.compute_start, f"prefill of {entry.request_id}"
    own = dict(entry.loads)
    new_loads = set(own)
    for node_id, tokens, state, locked in request.path:
      if at >= start:
        break
      if state == "host":
        new_loads.discard(node_id)
        if node_id in own:
          assert node_id not in loaded, f"{where}: node {node_id} is loaded twice"
          assert 0 < own[node_id] <= tokens, f"{where}: loads {own[node_id]} of {tokens}"
          assert own[node_id] % page_size == 0, f"{where}: loads a part of a page"
          loaded[node_id] = own[node_id]
          if offset == 0:
            needed += own[node_id] // page_size
        there = loaded.get(node_id, 0)
        assert min(at + tokens, start) - at <= there, f"{where}: node {node_id} is not loaded"
      else:
        assert state in ("device", "loading"), f"{where}: starts behind a span that is {state}"
        if state == "device" and not locked and node_id not in pinned and offset == 0:
          pinned.add(node_id)
          needed += tokens // page_size
      at += tokens
    assert not new_loads, f"{where}: loads nodes {sorted(new_loads)} that it does not read"
    prompt = offset + sum(span.tokens for span in request.path) + request.tail_tokens
    end = entry.compute_end
    assert start < end <= prompt, f"{where}: [{start}, {end}) of {prompt}"
    assert end == prompt or end % page_size == 0, f"{where}: a chunk ends within a page"
    if offset == 0 and entry.request_id in waiting:
      needed += pages_of(prompt - start, page_size)
  assert needed <= free or not plan.prefill, f"the plan needs {needed} pages of {free}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
  """Arrivals by round that try to make somebody wait for ever.

  `arrive(round, rng)`: the requests of a round, with where their blocks are cached ("", "device",
  "host"). `abort(system, round)`: ids whose clients give up.
  """

  name: str
  arrive: Callable[[int, random.Random], Sequence[tuple[ToyRequest, str]]]
  abort: Callable[[ToySystem, int], Sequence[int]] = lambda system, round_: ()
  device_pages: int = 256
  load_tokens_per_round: int = 1 << 30
  rounds: int = 80


def run_scenario(
  scenario: Scenario,
  policy: Policy,
  *,
  config: SchedulerConfig | None = None,
  bounded: bool = True,
  seed: int = 0,
  costs: views.Costs = views.Costs(),
) -> ToySystem:
  """Runs a scenario, then lets it drain; returns the system. `costs` are shown to the policy.

  Raises:
    AssertionError: a plan could not be carried out, requests were lost, or waiting exceeded the
      bound of `strata_jax.scheduler.policies` (unless `bounded` is off).
  """
  config = config or SchedulerConfig()
  system = ToySystem(
    TOY_BUDGETS,
    device_pages=scenario.device_pages,
    load_tokens_per_round=scenario.load_tokens_per_round,
    costs=costs,
  )
  rng = random.Random(seed)
  added = 0
  for round_ in range(scenario.rounds):
    for request, cached in scenario.arrive(round_, rng):
      system.add(request, cached=cached)
      added += 1
    for request_id in scenario.abort(system, round_):
      system.abort(request_id)
    system.step(policy)
    if bounded:
      limit = config.max_bypasses + config.max_postponements
      assert system.longest_passed_rounds <= limit, (
        f"{scenario.name}: somebody was passed over in {system.longest_passed_rounds} rounds, "
        f"expected at most {limit}"
      )
      assert system.longest_deferrals <= config.max_deferrals, (
        f"{scenario.name}: {system.longest_deferrals} deferrals, at most {config.max_deferrals}"
      )
  if bounded:
    drain(system, policy)
    over = len(system.finished) + len(system.aborted) + len(system.refused)
    assert over == added, f"{scenario.name}: {added} requests arrived, {over} are over"
  return system


def drain(system: ToySystem, policy: Policy, *, rounds: int = 5000) -> None:
  """Steps until nobody is left. Raises AssertionError after `rounds`."""
  for _ in range(rounds):
    if not system.live:
      return
    system.step(policy)
  raise AssertionError(f"{len(system.live)} requests are left after {rounds} rounds")


def check_conservation(policy: Policy, *, seeds: int = 5) -> None:
  """Random small prompts that share blocks: each is over once, and all pages come back."""
  for seed in range(seeds):
    rng = random.Random(seed)
    system = ToySystem(TOY_BUDGETS, device_pages=64, load_tokens_per_round=128)
    for request_id in range(60):
      depth = rng.randint(0, 4)
      blocks = tuple((f"{rng.randint(0, 2)}", 16 * (1 + level)) for level in range(depth))
      tail, output = rng.randint(1, 40), rng.randint(1, 24)
      request = ToyRequest(
        request_id=request_id, blocks=blocks, tail_tokens=tail, output_tokens=output
      )
      system.add(request, cached=rng.choice(("", "", "host")))
      system.step(policy)
      if rng.random() < 0.1 and system.live:
        system.abort(rng.choice(sorted(system.live)))
    drain(system, policy)
    over = sorted((*system.finished, *system.aborted, *system.refused))
    assert over == list(range(60)), f"seed {seed}: each request is over once, got {over}"
    view = system.view()
    left = view.capacity_pages - view.free_pages - view.evictable_pages
    assert left == 0, f"seed {seed}: {left} pages did not come back"


TOY_BUDGETS = views.Budgets(page_size=16, step_tokens=512, batch_requests=4, running_requests=8)
VICTIM = 100_000  # request id of whom a scenario is after


def _hot_prefix(round_: int, rng: random.Random) -> list[tuple[ToyRequest, str]]:
  """Four requests a round whose shared prefix is on the device; one that has none waits."""
  hot = (("hot", 256),)
  found = [
    (ToyRequest(request_id=round_ * 10 + i, blocks=hot, tail_tokens=64, output_tokens=2), "device")
    for i in range(4)
  ]
  if round_ == 3:
    found.append((ToyRequest(request_id=VICTIM, blocks=(("cold", 256),), tail_tokens=64), ""))
  return found


def _twins_of_twins(round_: int, rng: random.Random) -> list[tuple[ToyRequest, str]]:
  """Prompts that extend what the last ones are about to compute, two of each a round."""
  depth = 1 + round_ % 6
  blocks = tuple((f"{round_ // 6}.{level}", 128) for level in range(depth))
  return [
    (ToyRequest(request_id=round_ * 10 + i, blocks=blocks, tail_tokens=16), "") for i in range(2)
  ]


def _load_heavy_heads(round_: int, rng: random.Random) -> list[tuple[ToyRequest, str]]:
  """Every round one prompt that only loads arrives before three that only compute."""
  heavy = ToyRequest(request_id=round_ * 10, blocks=((f"heavy{round_}", 1024),), tail_tokens=1)
  light = [
    ToyRequest(request_id=round_ * 10 + i, blocks=(), tail_tokens=8, output_tokens=4)
    for i in (1, 2, 3)
  ]
  return (
    [(heavy, "host"), *((request, "") for request in light)] if round_ % 2 else [(heavy, "host")]
  )


def _fronts_before_a_loader(round_: int, rng: random.Random) -> list[tuple[ToyRequest, str]]:
  """Twins whose second one stands at the front next round and fills the batch, so that a prompt
  that loads much is postponed each time and never the head: the published rule starves it."""
  found = [
    (
      ToyRequest(request_id=round_ * 10 + i, blocks=((f"{round_}.{i // 2}", 128),), tail_tokens=1),
      "",
    )
    for i in range(4)
  ]
  if round_ == 2:
    found.append(
      (ToyRequest(request_id=VICTIM, blocks=(("loads", 40_960),), tail_tokens=1), "host")
    )
  return found


def _big_among_small(round_: int, rng: random.Random) -> list[tuple[ToyRequest, str]]:
  """A prompt that needs most of the device among small ones that always fit."""
  small = [
    ToyRequest(request_id=round_ * 10 + i, blocks=(), tail_tokens=200, output_tokens=8)
    for i in range(2)
  ]
  found = [(request, "") for request in small]
  if round_ == 5:
    found.append((ToyRequest(request_id=VICTIM, blocks=(("big", 3200),), tail_tokens=1), ""))
  return found


def _one_prefix(round_: int, rng: random.Random) -> list[tuple[ToyRequest, str]]:
  blocks = (("long", 2048),)
  return [(ToyRequest(request_id=round_, blocks=blocks, tail_tokens=16), "")] if round_ < 40 else []


def _abort_producers(system: ToySystem, round_: int) -> list[int]:
  """Whoever computes gives up half-way."""
  if round_ % 3 or round_ > 60:
    return []
  return [r.request_id for r in system.view().running if r.phase == "prefill"]


SCENARIOS = (
  Scenario(name="hot prefix", arrive=_hot_prefix),
  Scenario(name="twins of twins", arrive=_twins_of_twins),
  Scenario(
    name="load-heavy heads", arrive=_load_heavy_heads, load_tokens_per_round=512,
    device_pages=512,
  ),
  Scenario(name="big among small", arrive=_big_among_small),
  Scenario(name="fronts before a loader", arrive=_fronts_before_a_loader, device_pages=4096),
  Scenario(name="aborting producers", arrive=_one_prefix, abort=_abort_producers),
)  # fmt: skip


def _in_phase(running: dict[int, views.RunningView], phase: str) -> set[int]:
  return {request_id for request_id, r in running.items() if r.phase == phase}


def _subset(what: str, ids: Iterable[int], known: Iterable[int]) -> None:
  unknown = set(ids) - set(known)
  assert not unknown, f"{what}: requests {sorted(unknown)} are not there for it"


def _differs(
  when: str, view: views.SchedulerView, first: views.StepPlan, second: views.StepPlan
) -> str:
  fields = [
    f"{f.name}: {getattr(first, f.name)} -> {getattr(second, f.name)}"
    for f in dataclasses.fields(first)
    if getattr(first, f.name) != getattr(second, f.name)
  ]
  return f"{when}, another plan for view {view.version}: " + "; ".join(fields)
