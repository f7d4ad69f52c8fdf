"""All that the controller keeps of one request."""

from typing import Any, Literal

import numpy as np

from strata_jax.executors.protocol import LookUpWork
from strata_jax.radix_node import Node
from strata_jax.scheduler.views import RequestView
from strata_jax.workloads.request import Request

Phase = Literal["waiting", "prefill", "parked", "decode"]


class RequestState:
  """A request in the system: its tokens, its page table, and its place in the tree.

  While it waits, it stands in `waiters` of every node of its path down to `tip`. While it runs, it
  holds a device lock on the path down to `leaf`, and stands in `producers` of the nodes from there
  down to `tip`.
  """

  __slots__ = (
    "admitted_before",
    "after",
    "arrival_s",
    "bypasses",
    "cap_tokens",
    "chunk_end",
    "chunk_start",
    "computed_tokens",
    "context_tokens",
    "counted_tokens",
    "deferrals",
    "delayed_end",
    "delayed_start",
    "duplicate_pages",
    "front",
    "growing",
    "in_step",
    "keep_tokens",
    "last_token",
    "leaf",
    "length",
    "load_ids",
    "max_length",
    "over",
    "own_pages",
    "owned",
    "page_count",
    "pages",
    "phase",
    "postponements",
    "prefetch",
    "progress",
    "prompt_tokens",
    "reads_storage",
    "request",
    "request_id",
    "root",
    "sequence",
    "tip",
    "tokens",
    "view",
  )

  def __init__(self, request: Request, sequence: int, arrival_s: float, root: Node | None) -> None:
    prompt = len(request.prompt_ids)
    self.request = request
    self.request_id = request.request_id
    self.sequence = sequence  # of arrival
    self.arrival_s = arrival_s
    self.phase: Phase = "waiting"
    self.max_length = prompt + output_limit(request)
    self.tokens = np.empty(self.max_length, np.int32)  # prompt, then outputs
    self.tokens[:prompt] = request.prompt_ids
    self.length = prompt  # known tokens
    self.prompt_tokens = prompt  # grows by the outputs when it is preempted
    self.last_token = -1  # the newest output, whose KV is not written
    self.cap_tokens = 0  # what its path may cover
    self.context_tokens = 0  # with KV on the device
    self.pages = np.empty(0, np.int32)  # page table: device slots
    self.owned = np.empty(0, bool)  # which of them are its own, not the tree's
    self.own_pages = 0  # how many of them
    self.duplicate_pages = 0  # how many of these the tree has too
    self.page_count = 0
    self.root = root  # of its namespace; None while the cache is off
    self.tip = root
    self.leaf = root
    self.growing: Node | None = None  # the node that its decoded pages go to
    self.load_ids: list[int] = []  # transfers that its prompt's pages came by
    self.chunk_start = 0
    self.chunk_end = 0
    self.in_step = False  # its compute is under way
    self.over = False  # finished or aborted, leaves when its step is done
    self.keep_tokens = 0  # how much of it the cache keeps then
    self.counted_tokens = 0  # its accesses are counted up to here
    self.computed_tokens = 0  # had KV on the device before a preemption
    self.admitted_before = False
    self.deferrals = 0
    self.postponements = 0
    self.bypasses = 0
    self.front = False
    self.after: tuple[int, ...] = ()
    self.progress: int | None = None  # of what it was deferred for, at that time
    self.delayed_start = 0  # prompt positions that it was deferred for
    self.delayed_end = 0
    self.view: RequestView | None = None  # cached while it waits
    self.prefetch: Prefetch | None = None  # what storage is read for it while it waits
    self.reads_storage = True  # off once a plan has cancelled its prefetch

  @property
  def outputs(self) -> int:
    return self.length - len(self.request.prompt_ids)

  def reserve_pages(self, pages: int) -> None:
    """Makes the page table long enough."""
    if pages > len(self.pages):
      longer = np.empty(pages + pages // 4, np.int32)
      longer[: self.page_count] = self.pages[: self.page_count]
      owned = np.zeros(len(longer), bool)
      owned[: self.page_count] = self.owned[: self.page_count]
      self.pages, self.owned = longer, owned

  def append(self, outputs: tuple[int, ...]) -> None:
    """Takes sampled tokens in."""
    start = self.length
    self.length = start + len(outputs)
    if self.length > len(self.tokens):
      self.tokens = np.resize(self.tokens, self.length + 64)
    if len(outputs) == 1:
      self.tokens[start] = outputs[0]
    else:
      self.tokens[start : self.length] = outputs
    self.last_token = outputs[-1]

  def add_own(self, slots: np.ndarray) -> None:
    """Appends slots of its own to the page table."""
    first, last = self.page_count, self.page_count + len(slots)
    self.reserve_pages(last)
    self.pages[first:last] = slots
    self.owned[first:last] = True
    self.own_pages += len(slots)
    self.page_count = last

  def use_shared(self, first: int, slots: np.ndarray) -> np.ndarray:
    """Lets pages from `first` on be the tree's slots; returns its own ones that were there."""
    own = self.give_up(first, first + len(slots))
    self.pages[first : first + len(slots)] = slots
    return own

  def give_up(self, first: int, last: int) -> np.ndarray:
    """Its own slots among pages [first, last) of the page table, which are its own no longer."""
    if not self.own_pages:
      return self.pages[:0]
    own = self.pages[first:last][self.owned[first:last]]
    self.owned[first:last] = False
    self.own_pages -= len(own)
    return own

  def own_slots(self) -> np.ndarray:
    """All slots of its own: int32 [own pages]."""
    return self.pages[: self.page_count][self.owned[: self.page_count]]


class Prefetch:
  """What is read from storage for a waiting request: positions [begin, end) of its prompt."""

  __slots__ = ("base", "begin", "deadline_s", "end", "hold", "look_up", "next", "state")

  def __init__(
    self,
    state: RequestState,
    look_up: LookUpWork,
    base: int,
    begin: int,
    end: int,
    deadline_s: float,
  ) -> None:
    self.state = state
    self.look_up = look_up
    self.base = base  # where the tokens of the look-up begin
    self.begin = begin
    self.end = end  # until the look-up is answered: as far as it may lead
    self.next = begin  # what lies before is on the host, or on its way there
    self.deadline_s = deadline_s
    self.hold: Any = None  # keeps the host pages of its path from being evicted


def output_limit(request: Request) -> int:
  """How many tokens a request may give at most."""
  if request.forced_output_ids is not None:
    return len(request.forced_output_ids)
  return request.max_new_tokens
