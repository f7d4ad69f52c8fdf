"""Policies: compositions of stages. `schedule` is the one that a config describes.

  plan = schedule(view, SchedulerConfig())              # Strata with bounded waiting
  policy = make_policy("longest_prefix")                # view -> plan
  mine = dataclasses.replace(stages_of(config), order=my_order)
  plan = plan_step(view, config, mine)                  # one stage swapped

All are pure: the same view and config give the same plan, nothing is read or kept elsewhere.

Bounded waiting (rule 8). A round counts for a waiting request in at most one way: it was deferred,
postponed, or bypassed (a later arrival was admitted, it was not). Let a request fit into an emptied
device and E requests that arrived before it wait too (preempted ones come back to their place).
Then it is admitted no later than in its (E + max_bypasses + max_postponements + 1)-th round in
which anybody is admitted and it is not deferred; and it is deferred in at most max_deferrals + 1
rounds in which what it waits for makes no progress. Rounds held for a prefetch do not count, nor
those in which it would load but the window of rolling loads is full and no later arrival loads (the
window empties at the speed of the link); a request that is preempted itself starts anew.

What the controller counts, from the plan: `deferrals` + 1 for each of `plan.deferred` that was
deferred before and whose producer has computed nothing of the nodes it waited on (`after`) since;
`postponements` + 1 for each of `plan.postponed`; `bypasses` + 1 for each of `plan.bypassed`.
`front` and `after` are set by `plan.deferred`; they are cleared by admission, and by
`plan.postponed` once nothing of `after` is in flight any more. A producer that is parked while its
loads run progresses by them: nobody becomes urgent for waiting on it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from strata_jax.scheduler import admit as admission
from strata_jax.scheduler import defer as deferral
from strata_jax.scheduler import fill_bubble as bubbles
from strata_jax.scheduler import form_batch as batches
from strata_jax.scheduler import keep_running
from strata_jax.scheduler import load_or_compute as loading
from strata_jax.scheduler import order as orders
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.round import Candidate, Offer, Round
from strata_jax.scheduler.views import Deferred, SchedulerView, StepPlan

Policy = Callable[[SchedulerView], StepPlan]

_LOAD_OR_COMPUTE = {
  "load": loading.load_all,
  "cheaper": loading.load_cheaper,
  "split": loading.load_split,
  "compute": loading.load_none,
}
_ORDER = {
  "fcfs": orders.arrival,
  "longest_prefix": orders.longest_prefix,
  "shortest_load": orders.shortest_load,
  "most_shared": orders.most_shared,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
  """A policy's parts; see the module of each for what it is given and answers."""

  order: Callable[[Round, Sequence[int]], list[int]] = orders.arrival
  dedup: Callable[[Round, Sequence[int]], list[int]] = orders.arrival
  defer: Callable[[Round, Candidate], Deferred | None] = deferral.never
  load_or_compute: admission.LoadOrCompute = loading.load_all
  admit: Callable[[Round, Candidate, admission.LoadOrCompute], Offer | None] = admission.admit
  form_batch: Callable[[Round, Sequence[int], batches.TryAdmit], None] = batches.in_order
  fill_bubble: Callable[[Round], None] = bubbles.leave


@functools.lru_cache(maxsize=256)
def stages_of(config: SchedulerConfig) -> Stages:
  """The composition that the config's switches describe."""
  return Stages(
    order=_ORDER[config.order],
    dedup=orders.later_twins_last if config.dedup else orders.arrival,
    defer=deferral.delay_hits if config.deferral else deferral.never,
    load_or_compute=_LOAD_OR_COMPUTE[config.load_or_compute],
    form_batch=batches.balanced if config.balance or config.bundles else batches.in_order,
    fill_bubble=bubbles.with_decode if config.bubble_filling else bubbles.leave,
  )


def schedule(view: SchedulerView, config: SchedulerConfig) -> StepPlan:
  """What to do in the next step: a pure function of the view and the config."""
  return plan_step(view, config, stages_of(config))


def plan_step(view: SchedulerView, config: SchedulerConfig, stages: Stages) -> StepPlan:
  """Runs the stages: what runs goes on, then waiting requests join in line order.

  While parked requests load, others that need loads join them (rolling loads) or wait.

  Rule 8 stands outside the stages: urgent requests come first and are never deferred; if one does
  not fit, nothing else is admitted until it does (nothing else loads, if only the window of rolling
  loads is full).
  """
  round_ = Round(view, config)
  keep_running.decode_all(round_)
  keep_running.resume_parked(round_)
  keep_running.continue_prefills(round_, stages.load_or_compute, stages.defer)
  keep_running.keep_reserve(round_)
  if view.waiting and not round_.full:
    _admit_waiting(round_, stages)
    stages.fill_bubble(round_)
  keep_running.use_tokens_left(round_)
  keep_running.lengthen_decode(round_)
  return round_.plan()


def _admit_waiting(round_: Round, stages: Stages) -> None:
  waiting = round_.view.waiting
  found = orders.ready(round_)
  line = orders.in_line(round_, found, stages.dedup(round_, stages.order(round_, found)))
  parked = round_.view.parked
  loads_run = parked is not None and len(round_.resume) < len(parked.request_ids)

  def try_admit(candidate: Candidate) -> Offer | None:
    if candidate.request_id in round_.deferred:
      return None
    urgent = round_.is_urgent(waiting[candidate.arrived])
    if not urgent or loads_run:
      deferred = stages.defer(round_, candidate)
      if deferred is not None and (not urgent or _waits_for_parked(round_, deferred)):
        round_.defer(candidate, deferred)
        return None
    if admission.refuse_impossible(round_, candidate):
      return None
    offer = stages.admit(round_, candidate, stages.load_or_compute)
    if offer is not None and loads_run and offer.uses_loads and not offer.later:
      offer = None  # the bubble of a parked batch is for work without loads
    if offer is None and urgent:
      if candidate.request_id in round_.window_waits:
        round_.loads_closed = True
      else:
        round_.closed = True
    return offer

  stages.form_batch(round_, line, try_admit)


def _waits_for_parked(round_: Round, deferred: Deferred) -> bool:
  """Whether what it waits for is computed as soon as a load that runs now has come."""
  parked, in_flight = round_.view.parked, round_.view.in_flight
  if parked is None or parked.load_tokens_left <= 0:
    return False
  producers = (in_flight[node_id] for node_id in deferred.waits_on if node_id in in_flight)
  return any(producer.request_id in parked.request_ids for producer in producers)


_OFF = {
  "deferral": False,
  "balance": False,
  "bundles": False,
  "bubble_filling": False,
  "dedup": False,
}  # fmt: skip

POLICIES: dict[str, dict[str, Any]] = {
  "fcfs": {**_OFF, "order": "fcfs"},
  "longest_prefix": {**_OFF, "order": "longest_prefix"},
  "shortest_load": {**_OFF, "order": "shortest_load"},
  "dedup": {**_OFF, "order": "longest_prefix", "dedup": True},
  "strata": {},
  "strata_paper": {
    "order": "fcfs",
    "max_deferrals": math.inf,
    "max_postponements": math.inf,
    "max_bypasses": math.inf,
    "rolling_loads": False,
  },
}
"""Policies by name: the fields of SchedulerConfig that each one sets."""


def policy_config(name: str, config: SchedulerConfig | None = None) -> SchedulerConfig:
  """`config` with the fields that the named policy sets.

  Raises:
    ValueError: an unknown name.
  """
  if name not in POLICIES:
    raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {name!r}")
  return dataclasses.replace(config or SchedulerConfig(), **POLICIES[name])


def make_policy(name: str, config: SchedulerConfig | None = None) -> Policy:
  """A policy by name: a function from view to plan.

  Raises:
    ValueError: an unknown name.
  """
  return functools.partial(schedule, config=policy_config(name, config))
