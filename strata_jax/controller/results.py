"""What the controller answers: admissions, the outcome of a plan, counters."""

import dataclasses
from typing import NamedTuple

from strata_jax.executors.protocol import StepWork
from strata_jax.scheduler.views import Refused


class Admission(NamedTuple):
  """How a request entered the running set; tokens of its prompt by where they came from.

  Hits are counted once a request: after a preemption only tokens beyond what was on the device
  before count. `delay_hit_tokens` are those of the hits that another request computed while this
  one was deferred. `compute_tokens`: the prompt from `compute_start` on.
  """

  request_id: int
  device_hit_tokens: int
  host_hit_tokens: int
  storage_hit_tokens: int
  delay_hit_tokens: int
  load_tokens: int  # loads that this entry starts
  compute_tokens: int
  readmitted: bool  # admitted before and preempted since


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
  """The outcome of a plan: the work to launch, and what became of its entries."""

  work: StepWork | None = None  # None: nothing to launch
  admitted: tuple[Admission, ...] = ()
  refused: tuple[Refused, ...] = ()
  preempted: tuple[int, ...] = ()
  stale: tuple[int, ...] = ()  # entries dropped whole: they no longer fit what is held
  resumed: tuple[int, ...] = ()


class BackupProgress(NamedTuple):
  """How far the backup of a prompt's tokens got; each token counts where it is safest."""

  device_only: int
  in_host: int
  handed_over: int  # the store has its own copy, which a crash may lose
  durable: int


@dataclasses.dataclass(kw_only=True, slots=True)
class ControllerStats:
  """Counters since the start; they only grow."""

  admitted: int = 0
  refused: int = 0
  preempted: int = 0
  aborted: int = 0
  finished: int = 0
  stale_entries: int = 0
  loads: int = 0
  loaded_tokens: int = 0
  backups: int = 0
  backed_up_tokens: int = 0
  failed_backups: int = 0  # reported by the executor
  skipped_backups: int = 0  # no host pages to be had
  evicted_device_pages: int = 0
  evicted_host_pages: int = 0
  dropped_pages: int = 0  # evicted from the device without a copy in a lower tier
  taken_over_tokens: int = 0  # of prefilling prompts, computed or loaded by others meanwhile
  duplicate_tokens: int = 0  # computed although the tree had them by then
  recomputed_tokens: int = 0  # computed again after a preemption
  look_ups: int = 0  # in storage
  found_tokens: int = 0  # by them, as far as they are worth reading
  prefetches: int = 0  # reads from storage
  prefetched_tokens: int = 0
  lost_prefetch_tokens: int = 0  # found, but missing, bad or unreadable when they were read
  cut_prefetches: int = 0  # ended before all was read: the request was admitted or left
  shortened_prefetches: int = 0  # for want of host memory, or because something was lost
  spills: int = 0  # writes to storage
  spilled_pages: int = 0
  handed_over_pages: int = 0
  durable_pages: int = 0
  failed_spills: int = 0
  skipped_spills: int = 0  # nodes not written since the store had just refused others
