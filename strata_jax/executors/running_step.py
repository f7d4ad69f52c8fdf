"""A computing step under way, and the event that it ends with."""

import collections
import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from strata_jax import sampling
from strata_jax.executors import protocol

# Request ids (None: a row that does not sample), and what was sampled, int32 [B, 2] on the host.
_Result = tuple[tuple[int | None, ...], jax.Array]


@dataclasses.dataclass(kw_only=True, slots=True)
class RunningStep:
  """What was launched of a step, and when its parts were done.

  One thread launches and adds results, another one takes them in.
  """

  step_id: int
  started_s: float
  waits: bool  # its prefills read pages that its loads write
  # Two logits that are no further apart might as well have been the other way round.
  near_tie: float
  block: Callable[[], object] = lambda: None  # returns when what was launched last is done
  held_s: float = 0.0  # how long nothing was launched, for loads that were not there
  stall_end_s: float = 0.0  # when its loads let the compute begin
  # Seconds that its compute waited for loads, where that can be measured once all is done.
  stalled_s: Callable[[], float] | None = None
  prefill_end_s: float = 0.0
  decode_read_tokens: int = 0  # whose KV its decode steps read
  joint: bool = False  # its prefills are in one pass with its first decodes
  _results: collections.deque[_Result] = dataclasses.field(default_factory=collections.deque)
  _tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
  _ties: dict[int, list[int]] = dataclasses.field(default_factory=dict)

  def add_result(self, request_ids: tuple[int | None, ...], sampled: jax.Array) -> None:
    """Sampled tokens, see `sampling.unpack`; what was launched last is then their head."""
    self._results.append((request_ids, sampled))
    self.block = sampled.block_until_ready

  @property
  def results(self) -> int:
    """Results that are not taken in yet."""
    return len(self._results)

  def take(self, results: int = 1) -> None:
    """Takes in the tokens of the oldest results, so that less is left to do when the step ends.

    Waits for those that are not ready.
    """
    for _ in range(results):
      self._take(*self._results.popleft())

  def done(self, at_s: float) -> protocol.StepDone:
    """The event of the step, all of which is done; `at_s` is the time."""
    self.take(self.results)
    if self.stalled_s is not None:
      stalled = self.held_s + self.stalled_s()
    else:
      stalled = max(self.stall_end_s - self.started_s, self.held_s)
    prefill_s = max(self.prefill_end_s - self.started_s, 0.0)
    return protocol.StepDone(
      step_id=self.step_id,
      started_s=self.started_s,
      at_s=at_s,
      tokens={request_id: tuple(got) for request_id, got in self._tokens.items()},
      prefill_end_s=self.prefill_end_s,
      compute_s=max(prefill_s - stalled, 0.0),
      stall_s=stalled if self.waits else 0.0,
      decode_read_tokens=self.decode_read_tokens,
      joint=self.joint,
      near_ties={request_id: tuple(at) for request_id, at in self._ties.items()},
    )

  def _take(self, request_ids: tuple[int | None, ...], sampled: jax.Array) -> None:
    rows = zip(
      request_ids, *sampling.unpack(np.asarray(sampled)), strict=False  # the rest is padding
    )  # fmt: skip
    for request_id, token_id, gap in rows:
      if request_id is None:
        continue
      got = self._tokens.setdefault(request_id, [])
      if gap < self.near_tie:
        self._ties.setdefault(request_id, []).append(len(got))
      got.append(token_id)
