"""What a scheduler sees and what it answers: frozen, plain data that can be written as JSON.

Everything is counted in tokens and pages; a node id names a node of the HiRadixTree and is never
used twice. A plan refers to a view by its version.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

SpanState = Literal[
  "device",  # pages on the device
  "loading",  # pages on the way from host to device; not loaded again
  "host",  # pages in host memory, not on the device
  "prefetching",  # pages on the way from storage to host
  "storage",  # pages in storage only
  "in_flight",  # being computed by an active, paused or parked request
  "in_queue",  # transient: some waiting requests would compute it, none was chosen yet
  "absent",  # not in the tree
]


class Span(NamedTuple):
  """A run of a request's prompt in one state: one node of the tree, or a part that is absent."""

  node_id: int  # -1 when absent
  tokens: int
  state: SpanState
  locked: bool = False  # its device pages are not evictable now (they do not count as evictable)


class PrefetchView(NamedTuple):
  """How far the prefetch of a waiting request got."""

  arrived_tokens: int  # contiguous, already in host memory
  expected_tokens: int
  deadline_s: float | None  # None: no limit


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestView:
  """A request that waits.

  `path` covers the prompt from the root in whole pages, as far as pages can be cached: at most
  `floor((prompt - 1) / page_size)` pages, so that at least one token is computed. `tail_tokens` is
  the rest, always computed: `sum(span.tokens) + tail_tokens == prompt tokens` (for a preempted
  request the tokens it generated are part of the prompt).
  """

  request_id: int
  arrival_s: float
  path: tuple[Span, ...]
  tail_tokens: int
  output_reserve_tokens: int  # room for the KV of its output, to keep when it is admitted
  computed_tokens: int = 0  # computed for it before a preemption
  deferrals: int = 0  # rounds deferred without progress of the producer waited for
  postponements: int = 0
  bypasses: int = 0  # rounds in which a later arrival was admitted before it
  prefetch: PrefetchView | None = None
  tenant: str = ""
  front: bool = False  # deferred before: stands at the front until considered once more
  after: tuple[int, ...] = ()  # nodes its deferral waited on

  @property
  def prompt_tokens(self) -> int:
    return sum(span.tokens for span in self.path) + self.tail_tokens


class RunningView(NamedTuple):
  """A request that holds device pages. (A tuple: views hold one for every token decoded.)

  `context_tokens` have KV on the device (or being loaded, when parked). While it prefills, `path`
  and `tail_tokens` describe the rest of its prompt as in RequestView (own nodes are in_flight), so
  that every chunk consults the cache: spans that are on the device or host by now need no compute.
  `next_pages`: new device pages its next decode token needs (0 or 1).
  """

  request_id: int
  phase: Literal["prefill", "parked", "decode"]
  arrival_s: float
  context_tokens: int
  remaining_prefill_tokens: int = 0  # sum of path + tail_tokens
  path: tuple[Span, ...] = ()
  tail_tokens: int = 0
  next_pages: int = 0
  output_tokens_left: int = 0
  held_pages: int = 0  # device pages that its preemption would release or make evictable
  load_tokens_left: int | None = None  # parked: of the loads that it waits for; None: not known
  tenant: str = ""


class ParkedView(NamedTuple):
  """The requests whose loads run while other work fills the bubble; some may resume before all."""

  request_ids: tuple[int, ...]
  load_tokens_left: int
  compute_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
  """Limits of one step and of the running set."""

  page_size: int
  step_tokens: int  # prefill tokens computed in one step (the chunk budget)
  batch_requests: int  # requests in one prefill batch
  running_requests: int  # prefill + parked + decode
  decode_steps: int = 1  # decode steps that one plan may ask for at most


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
  """Linear costs for policies that weigh seconds; 0 means unknown."""

  load_s_per_token: float = 0.0  # host -> device
  load_latency_s: float = 0.0
  prefetch_s_per_token: float = 0.0  # storage -> host
  compute_s_per_token: float = 0.0
  compute_s_per_token_context: float = 0.0  # attention: times new tokens times context tokens
  decode_step_s: float = 0.0


class Producer(NamedTuple):
  """Who computes an in-flight node, and how many tokens until the node is complete."""

  request_id: int
  tokens_left: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerView:
  """The whole state a decision may depend on. `now_s` is data: no stage reads a clock."""

  version: int
  waiting: tuple[RequestView, ...]  # in arrival order
  running: tuple[RunningView, ...] = ()  # in admission order
  parked: ParkedView | None = None
  in_flight: Mapping[int, Producer] = dataclasses.field(default_factory=dict)
  loading: Mapping[int, int] = dataclasses.field(default_factory=dict)  # node id: tokens left
  free_pages: int = 0
  evictable_pages: int = 0
  capacity_pages: int = 0
  budgets: Budgets
  costs: Costs = Costs()
  now_s: float = 0.0


class Load(NamedTuple):
  """Load the first `tokens` (whole pages) of a node that is on host."""

  node_id: int
  tokens: int


class Prefill(NamedTuple):
  """Admit or continue a request: after `loads`, compute prompt positions [start, end).

  Everything before `compute_start` is on the device, loading, or in `loads` (by this entry or an
  earlier one of the same plan: a node is loaded once). `end` is the prompt length for the last
  chunk, else a multiple of the page size beyond `start`.
  """

  request_id: int
  loads: tuple[Load, ...]
  compute_start: int
  compute_end: int


class Deferred(NamedTuple):
  """A request that waits for what another computes or was chosen to compute."""

  request_id: int
  reason: str  # "in_flight" or "claimed"
  waits_on: tuple[int, ...]  # node ids


class Refused(NamedTuple):
  """A request that can never run, and why."""

  request_id: int
  reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
  """What to do in one step. Ids not named keep waiting or running unchanged.

  `park` names entries of `prefill` whose loads start now while their compute waits; `resume` names
  parked requests whose compute starts now. A step that computes anything runs its prefill part
  first, then `decode_steps` decode steps of `decode`. `wake_at_s` asks to be called again by then
  when nothing else happens (a prefetch deadline).
  """

  version: int
  prefill: tuple[Prefill, ...] = ()
  park: tuple[int, ...] = ()
  resume: tuple[int, ...] = ()
  decode: tuple[int, ...] = ()
  decode_steps: int = 1
  preempt: tuple[int, ...] = ()
  cancel_prefetch: tuple[int, ...] = ()
  deferred: tuple[Deferred, ...] = ()
  postponed: tuple[int, ...] = ()
  bypassed: tuple[int, ...] = ()
  bundled: tuple[int, ...] = ()  # admitted as bundle hits (for the tables)
  refused: tuple[Refused, ...] = ()
  wake_at_s: float | None = None

  @property
  def is_idle(self) -> bool:
    """Whether the plan starts no work."""
    return not (self.prefill or self.resume or self.decode or self.preempt or self.refused)
