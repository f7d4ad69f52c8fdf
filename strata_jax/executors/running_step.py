"""A computing step under way, and the event that it ends with."""

import dataclasses
from collections.abc import Callable

import jax

from strata_jax.executors import protocol


@dataclasses.dataclass(kw_only=True, slots=True)
class RunningStep:
  """What was launched of a step, and when its parts were done."""

  step_id: int
  started_s: float
  waits: bool  # its prefills read pages that its loads write
  block: Callable[[], object] = lambda: None  # returns when what was launched last is done
  stall_end_s: float = 0.0  # when its loads let the compute begin
  prefill_end_s: float = 0.0
  # Request ids (None: a row that does not sample), ids [B, 1], gaps [B].
  results: list[tuple[tuple[int | None, ...], jax.Array, jax.Array]] = dataclasses.field(
    default_factory=list
  )

  def add_result(
    self, request_ids: tuple[int | None, ...], ids: jax.Array, gaps: jax.Array
  ) -> None:
    """Sampled tokens; what was launched last is then their head."""
    self.results.append((request_ids, ids, gaps))
    self.block = gaps.block_until_ready

  def done(self, at_s: float, near_tie: float) -> protocol.StepDone:
    """The event of the step; its results are ready.

    Args:
      at_s: the time.
      near_tie: two logits that are no further apart than this might as well have been the other
        way round.
    """
    tokens: dict[int, list[int]] = {}
    ties: dict[int, list[int]] = {}
    for request_ids, ids, gaps in jax.device_get(self.results):
      for row, request_id in enumerate(request_ids):
        if request_id is None:
          continue
        got = tokens.setdefault(request_id, [])
        if gaps[row] < near_tie:
          ties.setdefault(request_id, []).append(len(got))
        got.append(int(ids[row, 0]))
    stalled = max(self.stall_end_s - self.started_s, 0.0)
    prefill_s = max(self.prefill_end_s - self.started_s, 0.0)
    return protocol.StepDone(
      step_id=self.step_id,
      started_s=self.started_s,
      at_s=at_s,
      tokens={request_id: tuple(got) for request_id, got in tokens.items()},
      prefill_end_s=self.prefill_end_s,
      compute_s=max(prefill_s - stalled, 0.0),
      stall_s=stalled if self.waits else 0.0,
      near_ties={request_id: tuple(at) for request_id, at in ties.items()},
    )
