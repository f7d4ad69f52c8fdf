import numpy as np

from strata_jax.clients import Clients
from strata_jax.metrics import RequestRecord
from strata_jax.workloads.request import Request


def _clients(*fields):
  requests = [
    Request(request_id=i, prompt_ids=np.zeros(1, np.int32), **f) for i, f in enumerate(fields)
  ]
  records = {r.request_id: RequestRecord(r.request_id, 1) for r in requests}
  return Clients(requests, records), records


def _in(clients, now_s):
  """Ids of all who may enter now."""
  found = []
  while (request := clients.next_in(now_s)) is not None:
    found.append(request.request_id)
  return found


def test_arrivals_come_in_order_of_time_then_as_given():
  clients, records = _clients(
    {"arrival_s": 2.0}, {"arrival_s": 1.0}, {}, {"arrival_s": 1.0}, {"arrival_s": 0.0}
  )
  assert clients.advance(0.5) == []
  assert _in(clients, 0.5) == [2, 4]
  assert records[2].arrival_s == 0.5  # closed loop: when it was let in
  assert clients.next_s == 1.0
  assert not clients.all_came
  clients.advance(3.0)
  assert _in(clients, 3.0) == [1, 3, 0]
  assert [records[i].arrival_s for i in (0, 1, 3, 4)] == [2.0, 1.0, 1.0, 0.0]
  assert clients.all_came
  assert clients.next_s is None


def test_who_waits_outside_is_no_timer():
  clients, _ = _clients({"arrival_s": 1.0}, {"arrival_s": 5.0})
  clients.advance(2.0)
  assert clients.next_s == 5.0  # the first has arrived, though nobody let it in


def test_clients_give_up_outside_and_inside():
  clients, records = _clients(
    {"arrival_s": 1.0, "abort_s": 1.0}, {"abort_s": 2.0}, {"arrival_s": 0.0, "abort_s": 9.0}
  )
  assert clients.advance(1.0) == []
  assert clients.next_in(1.0).request_id == 1  # from now on it waits 2 s
  (outside,) = clients.advance(2.0)
  assert outside is records[0]
  outside.outcome = "aborted"
  assert _in(clients, 2.0) == [2]
  (inside,) = clients.advance(3.0)
  assert inside is records[1]
  records[2].outcome = "finished"
  assert clients.advance(20.0) == []
  assert clients.next_s is None


def test_followers_arrive_after_their_think_time():
  clients, records = _clients({}, {"follows": 0, "think_s": 2.0, "abort_s": 1.0}, {"follows": 0})
  assert _in(clients, 0.0) == [0]
  assert clients.all_came  # who follows is not outside yet
  clients.over(0, 5.0)
  assert not clients.all_came
  assert clients.next_s == 5.0
  clients.advance(6.0)
  assert _in(clients, 6.0) == [2]
  clients.advance(7.0)
  assert _in(clients, 7.0) == [1]
  assert clients.advance(8.0) == [records[1]]
