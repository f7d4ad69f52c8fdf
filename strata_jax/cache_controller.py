"""CacheController: the one owner of what page of which tier holds what.

Turns plans into work and completions into tree states. No clock: times are handed in and only
passed on. Deterministic: the same calls give the same slots.
"""

from strata_jax.config import CacheConfig, ServingConfig
from strata_jax.controller.results import Admission, Applied, ControllerStats
from strata_jax.executors.protocol import Event, StepWork
from strata_jax.scheduler.views import Costs, SchedulerView, StepPlan
from strata_jax.workloads.request import Request

__all__ = ["Admission", "Applied", "CacheController", "ControllerStats"]


class CacheController:
  """Metadata of the device and host tiers, and of every request in the system."""

  def __init__(
    self,
    cache: CacheConfig,
    serving: ServingConfig,
    *,
    fingerprint: str = "",
    context_tokens: int | None = None,
    costs: Costs = Costs(),
  ) -> None:
    self.cache = cache
    self.serving = serving
    self.stats = ControllerStats()

  def add(self, request: Request, now_s: float) -> str | None:
    """Takes a request in. None: it waits; text: why it can never run (nothing changed)."""
    raise NotImplementedError

  def view(self, now_s: float) -> SchedulerView:
    """The frozen state a plan is made from."""
    raise NotImplementedError

  def apply(self, plan: StepPlan, now_s: float) -> Applied:
    """Carries a plan out in the metadata and returns the work to launch."""
    raise NotImplementedError

  def complete(self, event: Event, now_s: float) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Takes an executor's event in; returns (request id, its new tokens) of a finished step."""
    raise NotImplementedError

  def finish(self, request_id: int, now_s: float, *, output_tokens: int | None = None) -> None:
    """The request is over; its whole pages stay, of its output at most `output_tokens`."""
    raise NotImplementedError

  def abort(self, request_id: int, now_s: float) -> None:
    """Takes a request out, in any phase; unknown ids (already over) are ignored."""
    raise NotImplementedError

  def flush(self, now_s: float) -> StepWork | None:
    """Backups that wait for a step to ride in, as work of their own."""
    raise NotImplementedError

  def reset(self) -> None:
    """Empties every tier. Raises RuntimeError, changing nothing, while anything is in use."""
    raise NotImplementedError

  def check(self) -> None:
    """Raises AssertionError when an invariant is broken."""
    raise NotImplementedError
