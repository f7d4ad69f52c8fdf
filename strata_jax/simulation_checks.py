"""Laws that every simulated run keeps; a run that breaks one is a bug, not a result."""

import itertools
import math
from collections.abc import Sequence

from strata_jax.cache_controller import CacheController
from strata_jax.executors.timeline import CostTimeline, LinkUse
from strata_jax.metrics import RequestRecord, ServingResult, StepRow
from strata_jax.radix_tree import DEVICE, HOST
from strata_jax.workloads.workload import Workload

_TOLERANCE = 1e-6


class CheckError(AssertionError):
  """A run broke a law."""


def check_run(
  workload: Workload, result: ServingResult, timeline: CostTimeline, controller: CacheController
) -> None:
  """All checks. Raises CheckError."""
  requests_are_conserved(workload, result.requests)
  time_runs_forwards(result.requests, result.steps)
  littles_law(result.requests, result.ended_s)
  links_keep_their_rate(timeline, result.ended_s)
  pages_are_conserved(controller)


def requests_are_conserved(workload: Workload, records: Sequence[RequestRecord]) -> None:
  """Each request is over exactly once; a finished one computed or hit every prompt token."""
  wanted = [request.request_id for request in workload.requests]
  if [record.request_id for record in records] != wanted:
    raise CheckError("expected one record for each request, in order")
  lengths = {request.request_id: len(request.prompt_ids) for request in workload.requests}
  for record in records:
    who = f"request {record.request_id}"
    if record.outcome not in ("finished", "aborted", "refused"):
      raise CheckError(f"{who}: expected an end, got {record.outcome!r}")
    if record.outcome != "finished":
      continue
    if record.late_hit_tokens < 0:
      raise CheckError(f"{who}: hits and computed tokens exceed its prompt: {record}")
    hits = record.device_hit_tokens + record.host_hit_tokens + record.storage_hit_tokens
    if record.prompt_tokens != lengths[record.request_id] or hits >= record.prompt_tokens:
      raise CheckError(f"{who}: expected at least one token to be computed: {record}")


def time_runs_forwards(records: Sequence[RequestRecord], steps: Sequence[StepRow]) -> None:
  """Stages of a request follow each other; computing steps do not overlap."""
  for record in records:
    stages = [
      record.arrival_s,
      record.dispatched_s,
      record.admitted_s,
      record.first_token_s,
      record.over_s,
    ]
    times = [at_s for at_s in stages if at_s is not None]
    if any(later < earlier - _TOLERANCE for earlier, later in itertools.pairwise(times)):
      raise CheckError(f"request {record.request_id}: time runs backwards: {stages}")
  last_end_s = 0.0
  for step in steps:
    if not (step.prefill_requests or step.decode_requests):
      continue
    if step.started_s < last_end_s - _TOLERANCE or step.ended_s < step.started_s - _TOLERANCE:
      raise CheckError(f"step {step.step_id} overlaps the one before: {step}")
    last_end_s = step.ended_s


def littles_law(records: Sequence[RequestRecord], ended_s: float) -> None:
  """The number in the system, summed over time, is the time in the system, summed over requests."""
  changes = sorted(
    change for record in records for change in ((record.arrival_s, 1), (record.over_s or 0.0, -1))
  )
  area = 0.0
  inside, last_s = 0, 0.0
  for at_s, change in changes:
    area += inside * (at_s - last_s)
    inside, last_s = inside + change, at_s
  sojourn_s = math.fsum((record.over_s or 0.0) - record.arrival_s for record in records)
  if inside or abs(area - sojourn_s) > _TOLERANCE * max(1.0, sojourn_s):
    raise CheckError(f"Little's law: {area} request seconds in the system, {sojourn_s} by request")
  if last_s > ended_s + _TOLERANCE:
    raise CheckError(f"a request was over at {last_s}, after the run ended at {ended_s}")


def links_keep_their_rate(timeline: CostTimeline, ended_s: float) -> None:
  """Bytes over a link are at most its peak rate times its time, which is at most the run's."""
  profile = timeline.costs.profile
  uses: tuple[tuple[str, LinkUse, float], ...] = (
    ("host to device", timeline.down, profile.load.peak_gbps),
    ("device to host", timeline.up, profile.backup.peak_gbps),
  )
  for name, use, peak_gbps in uses:
    if use.bytes_moved > peak_gbps * 1e9 * use.busy_s * (1 + _TOLERANCE):
      raise CheckError(f"{name}: {use.bytes_moved} bytes in {use.busy_s} s exceed {peak_gbps} GB/s")
    if use.busy_s > ended_s + _TOLERANCE:
      raise CheckError(f"{name}: busy for {use.busy_s} s of {ended_s} s")
  if timeline.compute_busy_s > ended_s + _TOLERANCE:
    raise CheckError(f"compute: busy for {timeline.compute_busy_s} s of {ended_s} s")


def pages_are_conserved(controller: CacheController) -> None:
  """When all requests are over every page of a tier is free or evictable, and none is both."""
  tiers = controller.tiers
  for name, pool, pages in (
    ("device", tiers.device, tiers.tree.pages[DEVICE]),
    ("host", tiers.host, tiers.tree.pages[HOST]),
  ):
    if pages.protected or pages.in_transfer:
      raise CheckError(f"{name}: expected nothing in use at the end, got {pages}")
    if pool.free_pages + pages.evictable != pool.capacity_pages:
      raise CheckError(
        f"{name}: {pool.free_pages} free and {pages.evictable} evictable pages are not the"
        f" {pool.capacity_pages} there are"
      )
