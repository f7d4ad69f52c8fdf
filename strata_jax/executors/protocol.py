"""The contract between the serving loop and an executor.

The controller turns a plan into a StepWork: slots and positions, no policy. The executor launches
it and later reports events. Time belongs to the executor: real seconds or a virtual clock.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadWork:
  """Host -> device. The host slots stay locked until LoadDone."""

  transfer_id: int
  request_id: int  # who asked for it first
  node_ids: tuple[int, ...]
  host_slots: np.ndarray  # int32 [pages]
  device_slots: np.ndarray  # int32 [pages], distinct
  tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackupWork:
  """Device -> host, of pages that finished steps wrote; host slots are locked until BackupDone.

  A step's backups read their device pages before its loads and computes write anything, so that an
  eviction under write-back can hand the device slots to the same step (`evicts`). Otherwise the
  device slots stay locked until BackupDone as well.
  """

  transfer_id: int
  node_ids: tuple[int, ...]
  device_slots: np.ndarray  # int32 [pages]
  host_slots: np.ndarray  # int32 [pages], distinct
  tokens: int
  evicts: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrefillWork:
  """Compute prompt positions [start, start + len(token_ids)) of one request."""

  request_id: int
  token_ids: np.ndarray  # int32 [chunk]
  start: int  # tokens of the context before the chunk
  page_table: np.ndarray  # int32 [ceil((start + chunk) / page_size)]: device slots
  samples: bool  # the last chunk: gives the first output token
  waits_for: tuple[int, ...] = ()  # transfer ids of loads that the chunk reads


class DecodeWork(NamedTuple):
  """Decode steps of one request; its page table has room for all of them.

  The table may be a view of the controller's: it is valid until the step's StepDone.
  """

  request_id: int
  token_id: int  # the last token, whose KV is not written yet
  position: int  # of that token = context tokens before it
  page_table: np.ndarray  # int32 [ceil((position + decode_steps) / page_size)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
  """One step. Loads start at once; prefills run first, then the decode steps.

  `parked_loads`: loads that belong to no compute of this step. A step without prefills and
  decodes only starts transfers and gets no StepDone.
  """

  step_id: int
  loads: tuple[LoadWork, ...] = ()
  backups: tuple[BackupWork, ...] = ()
  prefills: tuple[PrefillWork, ...] = ()
  decodes: tuple[DecodeWork, ...] = ()
  decode_steps: int = 1
  parked_loads: tuple[int, ...] = ()  # transfer ids among `loads`

  @property
  def computes(self) -> bool:
    return bool(self.prefills or self.decodes)


class LoadDone(NamedTuple):
  """The load has READ its host slots and written its device slots."""

  transfer_id: int
  at_s: float


class BackupDone(NamedTuple):
  """A backup has ended; `ok`: its pages are on the host."""

  transfer_id: int
  at_s: float
  ok: bool = True


class StepDone(NamedTuple):
  """The compute of a step has finished; all its KV is written.

  `tokens[request_id]`: the sampled tokens (one for a last prefill chunk, up to `decode_steps` for
  a decode). `stall_s`: time its prefill waited for loads; `compute_s`: prefill time without it.
  `decode_read_tokens`: tokens whose KV its decode steps read, what rows read together once; 0 where
  the executor does not say. `joint`: the prefills were in one pass with the first decodes:
  `prefill_end_s` is the end of its layers and the prefills' head, that of the decodes comes after.
  """

  step_id: int
  started_s: float
  at_s: float
  tokens: Mapping[int, tuple[int, ...]]
  prefill_end_s: float = 0.0  # when the prefill part (and its first tokens) was done
  compute_s: float = 0.0
  stall_s: float = 0.0
  near_ties: Mapping[int, tuple[int, ...]] = MappingProxyType({})  # indices into `tokens[id]`
  decode_read_tokens: int = 0
  joint: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LookUpWork:
  """How many pages of a prompt, from page `skip_pages` of `token_ids` on, storage has in a row.

  Page keys chain from `parent_key` (see `page_keys`) over `token_ids`, whole pages.
  """

  work_id: int
  request_id: int
  parent_key: bytes
  token_ids: np.ndarray  # int32 [whole pages]
  skip_pages: int  # in host memory already; only their keys are needed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchWork:
  """Storage -> host: pages that a look-up found, in a row. Their slots are locked until then."""

  work_id: int
  look_up: LookUpWork
  first_page: int  # counted as in the look-up's token_ids
  host_slots: np.ndarray  # int32 [pages], distinct


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpillWork:
  """Host -> storage: the pages of `token_ids` after `skip_pages`.

  Their slots are locked until SpillHanded.
  """

  work_id: int
  parent_key: bytes
  token_ids: np.ndarray  # int32 [whole pages]
  skip_pages: int
  host_slots: np.ndarray  # int32 [pages], distinct


StorageWork = LookUpWork | PrefetchWork | SpillWork


class LookUpDone(NamedTuple):
  """A look-up in the store has ended; `pages`: how many it has."""

  work_id: int
  at_s: float
  pages: int  # in a row


class PrefetchDone(NamedTuple):
  """`pages`: how many of the work's pages came right, in a row from its first; the rest is lost."""

  work_id: int
  at_s: float
  pages: int


class SpillHanded(NamedTuple):
  """The store has its own copy: the host slots may be used again. It may not be durable yet."""

  work_id: int
  at_s: float
  last_key: bytes  # of the last page


class SpillDone(NamedTuple):
  """The pages are durable, or (not ok) the store refused them. Comes after SpillHanded."""

  work_id: int
  at_s: float
  ok: bool = True


StorageEvent = LookUpDone | PrefetchDone | SpillHanded | SpillDone
Event = LoadDone | BackupDone | StepDone | StorageEvent


class SamplingParams(NamedTuple):
  """How output tokens are drawn."""

  temperature: float = 0.0  # 0: greedy
  seed: int = 0  # the draw for output i of a request depends on (seed, i) alone


class Executor(Protocol):
  """Carries steps out. At most one computing step is under way at a time."""

  def now_s(self) -> float: ...

  def register(
    self, request_id: int, sampling: SamplingParams, forced_output_ids: np.ndarray | None
  ) -> None:
    """Announces a request before its first work. A simulation answers with the forced ids."""
    ...

  def release(self, request_id: int) -> None:
    """The request is over."""
    ...

  def launch(self, work: StepWork) -> None:
    """Starts the work; returns without waiting for it."""
    ...

  def launch_storage(self, work: StorageWork) -> None:
    """Starts work of the storage tier; never waits for it. Any step may be under way."""
    ...

  def flush_storage(self) -> None:
    """Makes what was spilled durable soon; never waits for it."""
    ...

  def wait(self, until_s: float | None) -> list[Event]:
    """Events in time order: at least one, or none when `until_s` came first."""
    ...
