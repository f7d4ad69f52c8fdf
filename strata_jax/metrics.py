"""What a run is judged by: a waterfall per request, a row per step, a summary.

Times are seconds since the run began. Hit tokens are counted per tier once per request, at its
first admission; tokens that are computed again after a preemption are no hits.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

Outcome = Literal["waiting", "finished", "aborted", "refused"]


@dataclasses.dataclass(slots=True, eq=False)
class RequestRecord:
  """The life of one request; filled in by the serving loop."""

  request_id: int
  prompt_tokens: int
  tenant: str = ""
  outcome: Outcome = "waiting"
  reason: str = ""  # why it was refused, or what ended it: "stop", "length", "abort"

  arrival_s: float = 0.0  # scheduled; in a closed loop when the in-flight cap let it in
  dispatched_s: float | None = None  # handed to the system
  admitted_s: float | None = None  # chosen by a plan for the first time
  first_token_s: float | None = None  # prefill done, its first token is known
  over_s: float | None = None

  match_s: float = 0.0  # looking it up in the tree
  prefetch_s: float = 0.0  # from dispatch until the last pages came that storage was read for
  load_s: float = 0.0  # loads it asked for or waited for, from launch to arrival
  stall_s: float = 0.0  # its prefill steps waited for loads
  compute_s: float = 0.0  # its prefill steps without the waiting

  device_hit_tokens: int = 0
  host_hit_tokens: int = 0
  storage_hit_tokens: int = 0
  delay_hit_tokens: int = 0  # of the device hits: what another request computed meanwhile
  bundle_hit_tokens: int = 0  # of the host hits: loaded by another request of its batch
  loaded_tokens: int = 0  # host -> device on its behalf
  computed_tokens: int = 0  # prefill tokens computed for it, again after a preemption included
  recomputed_tokens: int = 0  # of these: computed or generated before already
  output_ids: list[int] = dataclasses.field(default_factory=list)
  near_ties: list[int] = dataclasses.field(default_factory=list)  # indices into output_ids

  deferrals: int = 0
  postponements: int = 0
  preemptions: int = 0
  wait_rounds: int = 0  # plans made between dispatch and admission

  @property
  def ttft_s(self) -> float | None:
    """From the scheduled arrival to the first token."""
    return None if self.first_token_s is None else self.first_token_s - self.arrival_s

  @property
  def tpot_s(self) -> float | None:
    """Mean time of an output token after the first."""
    outputs = len(self.output_ids)
    if self.first_token_s is None or self.over_s is None or outputs < 2:
      return None
    return (self.over_s - self.first_token_s) / (outputs - 1)

  @property
  def late_hit_tokens(self) -> int:
    """Taken from the cache after its admission, by a later chunk."""
    if self.first_token_s is None:
      return 0
    hits = self.device_hit_tokens + self.host_hit_tokens + self.storage_hit_tokens
    return self.prompt_tokens - hits - self.computed_tokens + self.recomputed_tokens

  def row(self) -> dict[str, Any]:
    """The request's line of `requests.jsonl`.

    The waterfall: `client_s + queue_s + prefill_s = ttft_s`, then `decode_s`; `prefill_s` holds
    `stall_s` and `compute_s` of its own steps, the rest of it is other work in between.
    """
    return {
      "request_id": self.request_id,
      "outcome": self.outcome,
      "reason": self.reason,
      "tenant": self.tenant,
      "prompt_tokens": self.prompt_tokens,
      "device_hit_tokens": self.device_hit_tokens,
      "host_hit_tokens": self.host_hit_tokens,
      "storage_hit_tokens": self.storage_hit_tokens,
      "delay_hit_tokens": self.delay_hit_tokens,
      "bundle_hit_tokens": self.bundle_hit_tokens,
      "late_hit_tokens": self.late_hit_tokens,
      "loaded_tokens": self.loaded_tokens,
      "computed_tokens": self.computed_tokens,
      "recomputed_tokens": self.recomputed_tokens,
      "output_tokens": len(self.output_ids),
      "output_ids": self.output_ids,
      "near_ties": self.near_ties,
      "arrival_s": self.arrival_s,
      "client_s": _between(self.arrival_s, self.dispatched_s),
      "queue_s": _between(self.dispatched_s, self.admitted_s),
      "match_s": self.match_s,
      "prefetch_s": self.prefetch_s,
      "load_s": self.load_s,
      "prefill_s": _between(self.admitted_s, self.first_token_s),
      "stall_s": self.stall_s,
      "compute_s": self.compute_s,
      "first_token_s": self.first_token_s,
      "ttft_s": self.ttft_s,
      "decode_s": _between(self.first_token_s, self.over_s),
      "over_s": self.over_s,
      "tpot_s": self.tpot_s,
      "deferrals": self.deferrals,
      "postponements": self.postponements,
      "preemptions": self.preemptions,
      "wait_rounds": self.wait_rounds,
    }


class StepRow(NamedTuple):
  """One launched step: a line of `steps.jsonl`. A step without compute ends as it starts."""

  step_id: int
  started_s: float
  prefill_end_s: float
  ended_s: float
  stall_s: float  # its prefill waited for loads
  compute_s: float  # its prefill without that, in a joint step the pass with its decodes
  prefill_requests: int
  prefill_tokens: int
  decode_requests: int
  decode_steps: int  # done; the executor may end a step before all that the plan asked for
  load_tokens: int
  backup_tokens: int
  parked: int  # requests whose loads it started while their compute waits
  waiting: int
  running: int
  deferred: int
  postponed: int
  bundled: int
  preempted: int
  stale: int
  # What its times depend on, for a fit of a profile:
  prefill_chunks: tuple[tuple[int, int], ...]  # of each prefill: its tokens, and those before them
  prefill_context_tokens: int  # sum of the tokens before the chunks
  decode_context_tokens: int  # sum of the tokens before its first decode step
  load_end_s: float | None  # when the last of its loads had come; None without loads
  decode_read_tokens: int = 0  # whose KV its decode steps read; 0: the executor did not say
  joint: bool = False  # prefills in one pass with the first decodes, which ends with their head


@dataclasses.dataclass(slots=True, eq=False)
class ServingResult:
  """A whole run: records in the order in which the requests were given."""

  requests: list[RequestRecord]
  steps: list[StepRow]
  closed_loop: bool = False  # no request had an arrival time of its own
  ended_s: float = 0.0
  plans: int = 0
  stale: int = 0  # entries of plans that no longer fitted and were dropped
  deadlocks: int = 0  # times that nothing could ever happen any more and requests were refused
  load_busy_s: float = 0.0  # time during which at least one load ran
  bubble_s: float = 0.0  # parked loads covered by other work
  parked_stall_s: float = 0.0  # parked loads that nothing covered


def summarize(
  result: ServingResult,
  *,
  token_bytes: int = 0,
  slo_ttft_s: float | None = None,
  slo_tpot_s: float | None = None,
  drain_limit_s: float = 0.0,
) -> dict[str, Any]:
  """The numbers of a run.

  Args:
    result: the run.
    token_bytes: KV bytes of a token, for `load_gbps`.
    slo_ttft_s: limit that a request must keep to count in `goodput_rps`; None: any.
    slo_tpot_s: the same for its time per output token.
    drain_limit_s: the run counts as saturated if it ends later after the last arrival than this
      and than 5 % of the time that the arrivals took (None in a closed loop).

  Returns:
    Plain values; a mean or percentile of nothing is None. `hit_ratio` is over all prompt tokens of
    finished requests. `stall_fraction` and `bubble_fraction` are over the prefill wall time:
    computing, stalled, or waiting for loads while decode steps ran. `jain_fairness` is Jain's
    index of the TTFTs (of their means by tenant if there are several tenants).
  """
  done = [r for r in result.requests if r.outcome == "finished"]
  ttft = _values(r.ttft_s for r in done)
  tpot = _values(r.tpot_s for r in done)
  arrivals = [r.arrival_s for r in result.requests]
  first_arrival_s, last_arrival_s = min(arrivals, default=0.0), max(arrivals, default=0.0)
  last_over_s = max((r.over_s or 0.0 for r in done), default=0.0)
  span_s = last_over_s - first_arrival_s
  drain_s = max(last_over_s - last_arrival_s, 0.0)
  total = {
    name: sum(getattr(r, name) for r in done)
    for name in (
      "prompt_tokens",
      "device_hit_tokens",
      "host_hit_tokens",
      "storage_hit_tokens",
      "delay_hit_tokens",
      "bundle_hit_tokens",
      "late_hit_tokens",
      "computed_tokens",
      "recomputed_tokens",
    )
  }
  hits = total["device_hit_tokens"] + total["host_hit_tokens"] + total["storage_hit_tokens"]
  outputs = sum(len(r.output_ids) for r in done)
  loaded = sum(step.load_tokens for step in result.steps)
  stall_s = sum(step.stall_s for step in result.steps) + result.parked_stall_s
  prefill_s = sum(step.compute_s for step in result.steps) + stall_s + result.bubble_s
  good = sum(
    (slo_ttft_s is None or (r.ttft_s or 0.0) <= slo_ttft_s)
    and (slo_tpot_s is None or (r.tpot_s or 0.0) <= slo_tpot_s)
    for r in done
  )
  saturated = drain_s > max(drain_limit_s, 0.05 * (last_arrival_s - first_arrival_s))
  return {
    "requests": len(result.requests),
    "finished": len(done),
    "aborted": sum(r.outcome == "aborted" for r in result.requests),
    "refused": sum(r.outcome == "refused" for r in result.requests),
    "ttft_mean_s": _mean(ttft),
    **{f"ttft_p{p}_s": _percentile(ttft, p) for p in (50, 90, 95, 99)},
    "ttft_from_dispatch_mean_s": _mean(
      _values(_between(r.dispatched_s, r.first_token_s) for r in done)
    ),
    "tpot_mean_s": _mean(tpot),
    "tpot_p99_s": _percentile(tpot, 99),
    "goodput_rps": good / span_s if span_s > 0 else None,
    "requests_per_s": len(done) / span_s if span_s > 0 else None,
    "output_tokens": outputs,
    "output_tokens_per_s": outputs / span_s if span_s > 0 else None,
    **total,
    "hit_ratio": hits / total["prompt_tokens"] if total["prompt_tokens"] else None,
    "loaded_tokens": loaded,
    "load_gbps": loaded * token_bytes / result.load_busy_s / 1e9 if result.load_busy_s else None,
    "stall_fraction": stall_s / prefill_s if prefill_s > 0 else 0.0,
    "bubble_fraction": result.bubble_s / prefill_s if prefill_s > 0 else 0.0,
    "near_ties": sum(len(r.near_ties) for r in done),
    "deferred": sum(r.deferrals for r in result.requests),
    "postponed": sum(r.postponements for r in result.requests),
    "preempted": sum(r.preemptions for r in result.requests),
    "stale": result.stale,
    "longest_wait_rounds": max((r.wait_rounds for r in result.requests), default=0),
    "jain_fairness": _fairness(done),
    "plans": result.plans,
    "steps": len(result.steps),
    "deadlocks": result.deadlocks,
    "drain_s": drain_s,
    "saturated": None if result.closed_loop else saturated,
    "served_s": result.ended_s,
  }


def identical_outputs(
  first: Sequence[RequestRecord], second: Sequence[RequestRecord]
) -> tuple[bool, list[int]]:
  """Compares the outputs of two runs of the same requests.

  Outputs of a request have to be equal up to its first near tie in either run.

  Returns:
    Whether all are, and the ids of the requests that differ.

  Raises:
    ValueError: the runs are not of the same requests.
  """
  if [r.request_id for r in first] != [r.request_id for r in second]:
    raise ValueError("two runs: expected the same requests in the same order")
  different = []
  for a, b in zip(first, second, strict=True):
    ties = a.near_ties[:1] + b.near_ties[:1]
    end = min(ties) if ties else None
    if a.outcome != b.outcome or a.output_ids[:end] != b.output_ids[:end]:
      different.append(a.request_id)
  return not different, different


def jain(values: np.ndarray) -> float | None:
  """Jain's index: 1 when all are equal, 1 / n when one has everything; None for no values."""
  square = float(np.square(values).sum())
  return float(values.sum()) ** 2 / (len(values) * square) if square else None


def _fairness(done: Sequence[RequestRecord]) -> float | None:
  groups: dict[str, list[float]] = {}
  for r in done:
    groups.setdefault(r.tenant, []).append(r.ttft_s or 0.0)
  if len(groups) == 1:
    (values,) = groups.values()
    return jain(np.asarray(values))
  return jain(np.asarray([sum(values) / len(values) for values in groups.values()]))


def _between(start_s: float | None, end_s: float | None) -> float | None:
  return None if start_s is None or end_s is None else end_s - start_s


def _values(values) -> np.ndarray:
  return np.asarray([value for value in values if value is not None], dtype=np.float64)


def _mean(values: np.ndarray) -> float | None:
  return float(values.mean()) if len(values) else None


def _percentile(values: np.ndarray, percent: float) -> float | None:
  return float(np.percentile(values, percent)) if len(values) else None
