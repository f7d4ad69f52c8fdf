"""What a schedule may be told: every mechanism is a switch, every threshold a field."""

import dataclasses
import math

from strata_jax import validation

ORDERS = ("fcfs", "longest_prefix", "shortest_load", "most_shared")
BALANCE_BY = ("token_ratio", "predicted_seconds")
LOAD_OR_COMPUTE = ("load", "cheaper", "split", "compute")
PREFETCH_WAITS = ("best_effort", "wait_complete", "timeout", "cost")
PROFILED = "profiled"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
  """Switches and thresholds of the stages. The defaults are Strata's, with bounded waiting.

  A mechanism that is off leaves no trace: plans are those of a scheduler without it. Any
  threshold or limit may be `math.inf`, which means never.
  """

  order: str = "fcfs"  # who comes first: fcfs, longest_prefix, shortest_load or most_shared
  order_max_waiting: float = math.inf  # with more requests waiting the order is FCFS

  deferral: bool = True  # delay hits wait for the request that computes what they share
  deferral_threshold_tokens: float = 100  # a longer run that another computes is a delay hit

  balance: bool = True  # a request with which the batch would be loading-bound is postponed
  ratio_threshold: float | str = 100.0  # load ratio; "profiled": where loads take over (Costs)
  balance_by: str = "token_ratio"  # "predicted_seconds": load seconds over compute seconds
  seconds_threshold: float = 1.0  # the ratio above which "predicted_seconds" postpones
  refill: bool = True  # the postponed join when room is left

  bundles: bool = True  # requests that share what a batch loads join it
  bundle_slack_tokens: float = 100  # a bundle hit loads at most this beyond the batch's loads
  bundle_min_shared_tokens: float = 1  # and shares at least this with them

  bubble_filling: bool = True  # others decode while a loading-bound batch loads
  rolling_loads: bool = True  # parked requests resume one by one and others join; off: as a batch
  join_loading: bool = True  # who hits pages that a parked request loads joins the parked
  window_s: float = 0.2  # rolling loads: others join while fewer seconds of loads are on their way
  layerwise: bool = True  # compute may start while its load runs, layer by layer

  dedup: bool = False  # in-queue de-duplication as SGLang does it: later twins go to the end
  dedup_check_tokens: float = 32  # only requests with at most this many cached tokens
  dedup_shared_tokens: float = 32  # that share at least this much with an earlier one
  dedup_max_waiting: float = 128  # off with more requests waiting

  min_load_tokens: int = 0  # a shorter host hit is computed again
  load_or_compute: str = "load"  # "cheaper": all or nothing by cost; "split": k of n; "compute"
  prefetch: str = "best_effort"  # wait for storage; or "wait_complete", "timeout", "cost"

  max_deferrals: float = 8  # after so many a request is urgent: first, never deferred
  max_postponements: float = 8  # after so many a request is urgent
  max_bypasses: float = 8  # after so many rounds in which later arrivals went first it is urgent

  running_reserve_tokens: int = 128  # room kept for each running request's output, at most

  def __post_init__(self) -> None:
    validation.check_choice(self, "order", ORDERS)
    validation.check_choice(self, "balance_by", BALANCE_BY)
    validation.check_choice(self, "load_or_compute", LOAD_OR_COMPUTE)
    validation.check_choice(self, "prefetch", PREFETCH_WAITS)
    if self.ratio_threshold != PROFILED:
      validation.check_number(self, "ratio_threshold", minimum=0.0)
    for field in (
      "order_max_waiting",
      "deferral_threshold_tokens",
      "seconds_threshold",
      "bundle_slack_tokens",
      "bundle_min_shared_tokens",
      "window_s",
      "dedup_check_tokens",
      "dedup_shared_tokens",
      "dedup_max_waiting",
    ):
      validation.check_number(self, field, minimum=0.0)
    for field in ("max_deferrals", "max_postponements", "max_bypasses"):
      validation.check_number(self, field, minimum=1)
    for field in ("min_load_tokens", "running_reserve_tokens"):
      validation.check_int(self, field, minimum=0)
    for field in ("deferral", "balance", "refill", "bundles", "bubble_filling"):
      validation.check_choice(self, field, (False, True))
    for field in ("rolling_loads", "join_loading", "layerwise", "dedup"):
      validation.check_choice(self, field, (False, True))
