"""The clients of a run: when requests arrive, when they give up, and who waits outside.

Times are seconds since the run began. Requests that the in-flight cap keeps out stand in a FIFO.
"""

import collections
import heapq
import math
from collections.abc import Sequence

from strata_jax.metrics import RequestRecord
from strata_jax.workloads.request import Request


class Clients:
  """Hands requests out in the order of their arrival, equal times in the given order."""

  def __init__(self, requests: Sequence[Request], records: dict[int, RequestRecord]) -> None:
    """Takes the requests of a run and their records, by id, whose `arrival_s` it sets.

    Raises:
      ValueError: two requests with one id, a negative time, or one that follows a request that
        does not stand before it.
    """
    _check(requests)
    self._records = records
    self._requests = {r.request_id: r for r in requests}
    self._order = {r.request_id: i for i, r in enumerate(requests)}
    self._queue: collections.deque[int] = collections.deque()  # arrived, not in the system yet
    self._arrivals: list[tuple[float, int, int]] = []  # heap of (time, order, request id)
    self._aborts: list[tuple[float, int, int]] = []  # heap, the same
    self._followers: dict[int, list[Request]] = {}
    for r in requests:
      if r.follows is not None:
        self._followers.setdefault(r.follows, []).append(r)
      elif r.arrival_s is None:
        self._queue.append(r.request_id)
      else:
        self._arrives(r, r.arrival_s)

  @property
  def all_came(self) -> bool:
    """Whether nobody is outside any more; followers of requests in the system may come still."""
    return not (self._queue or self._arrivals)

  @property
  def next_s(self) -> float | None:
    """The next time at which somebody arrives or gives up, later than the last `advance`."""
    return min([heap[0][0] for heap in (self._arrivals, self._aborts) if heap], default=None)

  def advance(self, now_s: float) -> list[RequestRecord]:
    """Lets those come who have arrived by now; returns who gives up, outside or in the system."""
    while self._arrivals and self._arrivals[0][0] <= now_s:
      self._queue.append(heapq.heappop(self._arrivals)[2])
    given_up = []
    while self._aborts and self._aborts[0][0] <= now_s:
      record = self._records[heapq.heappop(self._aborts)[2]]
      if record.outcome == "waiting":
        given_up.append(record)
    return given_up

  def next_in(self, now_s: float) -> Request | None:
    """The next request to enter the system, if there is one outside."""
    while self._queue:
      request = self._requests[self._queue.popleft()]
      record = self._records[request.request_id]
      if record.outcome != "waiting":
        continue  # gave up outside
      if request.arrival_s is None and request.follows is None:  # closed loop
        record.arrival_s = now_s
        self._may_give_up(request, now_s)
      return request
    return None

  def over(self, request_id: int, at_s: float) -> None:
    """A request is over: those that follow it arrive after their think time."""
    for follower in self._followers.pop(request_id, ()):
      self._arrives(follower, at_s + follower.think_s)

  def _arrives(self, request: Request, at_s: float) -> None:
    request_id = request.request_id
    self._records[request_id].arrival_s = at_s
    heapq.heappush(self._arrivals, (at_s, self._order[request_id], request_id))
    self._may_give_up(request, at_s)

  def _may_give_up(self, request: Request, arrival_s: float) -> None:
    if request.abort_s is not None:
      request_id = request.request_id
      when_s = arrival_s + request.abort_s
      heapq.heappush(self._aborts, (when_s, self._order[request_id], request_id))


def _check(requests: Sequence[Request]) -> None:
  seen: set[int] = set()
  for r in requests:
    if r.request_id in seen:
      raise ValueError(f"request {r.request_id}: expected distinct ids")
    if r.follows is not None and r.follows not in seen:
      raise ValueError(
        f"request {r.request_id}: expected to follow an earlier request, got {r.follows}"
      )
    for name in ("arrival_s", "think_s", "abort_s"):
      value = getattr(r, name)
      if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"request {r.request_id}: expected a finite {name} >= 0, got {value}")
    seen.add(r.request_id)
