"""Transfers that run beside everything else: parked loads and backups, however they are copied.

Nothing keeps them in order with the compute but what is known here: which parked loads are under
way, and when what they brought is in the pools.
"""

from collections.abc import Callable, Collection

from strata_jax.executors import (
  choices,
  fragment_copies,
  protocol,
  side_copies,
  staged_loads,
  watcher,
)
from strata_jax.tiers import io_backend

Fragments = Callable[[str], fragment_copies.FragmentCopies]


class TransfersAside:
  """Starts transfers, whose ends come as events of a watcher."""

  def __init__(
    self,
    loads: str | None,
    backups: str | None,
    *,
    fragments: Fragments,
    staged: Callable[[], staged_loads.StagedLoads],
    events: watcher.Watcher,
    now_s: Callable[[], float],
  ) -> None:
    """Makes streams and threads for what goes aside.

    Args:
      loads: as `choices.loads_aside` has it; None: no loads go aside.
      backups: as `choices.backups_aside` has it, likewise.
      fragments: makes the copies of pages by a back end.
      staged: makes the way of whole pages.
      events: where the ends are posted.
      now_s: the executor's clock.
    """
    side = lambda way, to_device: side_copies.SideCopies(fragments(way), to_device=to_device)
    self.staged = staged() if loads == choices.STAGED else None
    by_fragments = loads is not None and self.staged is None
    self._loads = side(loads, True) if by_fragments else None
    self._backups = side(backups, False) if backups is not None else None
    self._events, self._now_s = events, now_s
    self._under_way: set[int] = set()  # transfer ids of parked loads

  @property
  def takes_loads(self) -> bool:
    """Whether parked loads go aside."""
    return self._loads is not None or self.staged is not None

  def takes(self, backup: protocol.BackupWork) -> bool:
    """Whether a backup goes aside: not where the step writes to its pages."""
    return self._backups is not None and not backup.evicts

  def start_load(self, work: protocol.LoadWork) -> None:
    """Starts a parked load, which is to be `taken` when it is done."""
    self._under_way.add(work.transfer_id)
    if self._loads is not None:
      self._events.expect(1)
      done = self._done(protocol.LoadDone, work.transfer_id)
      self._loads.start(work.host_slots, work.device_slots, done)
      return
    assert self.staged is not None
    self._events.expect(self.staged.parts(len(work.host_slots)))
    self.staged.start(work.transfer_id, work.host_slots, work.device_slots, self._events.post)

  def start_backup(self, work: protocol.BackupWork) -> None:
    """Starts a backup."""
    assert self._backups is not None
    self._events.expect(1)
    done = self._done(protocol.BackupDone, work.transfer_id)
    # A parked load counts as done once its last part is to be spread, behind the step under way.
    ready = (lambda: None) if self.staged is None else self.staged.spread_over
    self._backups.start(work.host_slots, work.device_slots, done, ready)

  def any_under_way(self, transfer_ids: Collection[int]) -> bool:
    """Whether a parked load is among these that has not come."""
    return not self._under_way.isdisjoint(transfer_ids)

  def taken(self, transfer_id: int) -> None:
    """A load is done, and its pages are in the pools for what is launched from now on."""
    self._under_way.discard(transfer_id)

  def spread(
    self, part: watcher.Internal, pools: io_backend.DevicePool
  ) -> tuple[io_backend.DevicePool, staged_loads.Arrived]:
    """Launches the second half of a part of a load: the pools, donated, and the part."""
    assert isinstance(part, staged_loads.Arrived)
    assert self.staged is not None
    return self.staged.spread(part, pools), part

  def _done(
    self, event: type[protocol.LoadDone] | type[protocol.BackupDone], transfer_id: int
  ) -> side_copies.Done:
    return lambda error: self._events.post(error or event(transfer_id, self._now_s()))
