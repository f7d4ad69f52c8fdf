"""Waits beside the main thread for what was launched, so that every time is taken when it happens.

Launching may itself take long (a CPU accepts only so many programs ahead); a thread that sleeps in
`block_until_ready` sees each part end, whatever the launching thread is doing.
"""

import queue
from collections.abc import Callable
from typing import NamedTuple

from strata_jax.executors import protocol, workers


class Internal:
  """Something that the executor has to do itself, in the thread that waits."""


Events = list[protocol.Event | Internal]


class _Point(NamedTuple):
  block: Callable[[], object]  # returns when the work before this point is done
  happen: Callable[[], protocol.Event | None]


class Watcher:
  """Points in the order of launching, turned into events as they are reached.

  A point that fails ends the watcher: `wait` raises its error, from then on.
  """

  def __init__(self) -> None:
    self._points: queue.SimpleQueue[_Point | None] = queue.SimpleQueue()
    self._events: queue.SimpleQueue[protocol.Event | Internal | BaseException] = queue.SimpleQueue()
    self._expected = 0
    self._error: BaseException | None = None
    workers.start(self, _watch, self._points, self._events)

  def add(
    self,
    block: Callable[[], object],
    happen: Callable[[], protocol.Event | None],
    *,
    gives_event: bool = True,
  ) -> None:
    """Adds a point: `happen` is called once `block` has returned, both in the watcher's thread."""
    self._expected += gives_event
    self._points.put(_Point(block, happen))

  @property
  def is_busy(self) -> bool:
    """Whether an event is to come that `wait` has not handed over."""
    return self._expected > 0

  def expect(self, events: int) -> None:
    """So many events will come by `post`."""
    self._expected += events

  def post(self, event: protocol.Event | Internal | BaseException) -> None:
    """Takes an event from any thread, beside the points, or an error that `wait` is to raise."""
    self._events.put(event)

  def wait(self, timeout_s: float | None) -> Events:
    """All events so far, at least one; none when the time is over first.

    Raises:
      RuntimeError: no event can come and there is no time limit.
    """
    if self._error is not None:
      raise self._error
    if not self._expected and timeout_s is None:
      raise RuntimeError("nothing is under way")
    events: Events = []
    try:
      self._take(self._events.get(timeout=timeout_s), events)
      while True:
        self._take(self._events.get_nowait(), events)
    except queue.Empty:
      return events

  def _take(self, item: protocol.Event | Internal | BaseException, events: Events) -> None:
    if isinstance(item, BaseException):
      self._error = item
      raise item
    self._expected -= 1
    events.append(item)


def _watch(
  points: "queue.SimpleQueue[_Point | None]",
  events: "queue.SimpleQueue[protocol.Event | Internal | BaseException]",
) -> None:
  while (point := points.get()) is not None:
    try:
      point.block()
      event = point.happen()
    except BaseException as error:  # whatever it is, the waiting thread must hear of it
      events.put(error)
      return
    if event is not None:
      events.put(event)
    del point, event  # no pool stays alive while there is nothing to watch
