from strata_jax.scheduler import order
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import policy_config, schedule
from strata_jax.scheduler.round import Round
from strata_jax.scheduler.views import Costs, PrefetchView
from tests.scheduler.build import admitted, view, waits

WAITING = (
  waits(0, (1, 100, "host"), (2, 900, "in_queue")),
  waits(1, (3, 500, "device"), (4, 50, "host")),
  waits(2, (3, 500, "device"), (5, 50, "loading"), (6, 10, "in_queue")),
  waits(3),
)


def _ordered(stage, *waiting, **config):
  round_ = Round(view(*waiting), SchedulerConfig(**config))
  return stage(round_, range(len(waiting)))


def test_orders():
  assert _ordered(order.arrival, *WAITING) == [0, 1, 2, 3]
  assert _ordered(order.longest_prefix, *WAITING) == [1, 2, 0, 3]
  assert _ordered(order.shortest_load, *WAITING) == [2, 3, 1, 0]


def test_above_the_limit_the_order_is_fcfs():
  for stage in (order.longest_prefix, order.shortest_load, order.most_shared):
    assert _ordered(stage, *WAITING, order_max_waiting=3) == [0, 1, 2, 3]
    assert _ordered(stage, *WAITING, order_max_waiting=4) == _ordered(stage, *WAITING)


def test_what_most_of_the_waiting_share_is_loaded_first():
  waiting = (
    waits(0, (1, 100, "host")),
    waits(1, (2, 900, "host")),
    waits(2, (3, 900, "device")),
    waits(3, (2, 900, "host"), (4, 50, "host")),
    waits(4, (5, 900, "device"), (2, 40, "host")),
    waits(5, (6, 100, "host")),
  )
  assert _ordered(order.most_shared, *waiting) == [2, 1, 3, 4, 0, 5]


def test_a_load_that_two_share_goes_before_an_earlier_one():
  state = view(
    waits(0, (1, 100, "host")), waits(1, (2, 900, "host")), waits(2, (2, 900, "host")),
    free_pages=1_000,
  )  # fmt: skip
  assert admitted(schedule(state, SchedulerConfig())) == [0]
  assert admitted(schedule(state, SchedulerConfig(order="most_shared"))) == [1, 2]


def test_urgent_then_front_then_the_rest():
  waiting = (
    waits(0), waits(1, front=True), waits(2), waits(3, postponements=8, front=True),
    waits(4, front=True), waits(5, bypasses=9),
  )  # fmt: skip
  round_ = Round(view(*waiting), SchedulerConfig())
  assert order.in_line(round_, range(6), [5, 4, 3, 2, 1, 0]) == [3, 5, 1, 4, 2, 0]


def test_dedup_sends_later_twins_to_the_end():
  twins = (
    waits(0, (1, 40, "in_queue"), (2, 100, "in_queue")),
    waits(1, (1, 40, "in_queue"), (3, 100, "in_queue")),
    waits(2, (4, 31, "in_queue"), (5, 9, "in_queue")),
    waits(3, (4, 31, "in_queue"), (6, 9, "in_queue")),
    waits(4, (7, 33, "device"), (1, 40, "in_queue")),
  )
  assert _ordered(order.later_twins_last, *twins) == [0, 2, 3, 4, 1]
  assert _ordered(order.later_twins_last, *twins, dedup_max_waiting=4) == [0, 1, 2, 3, 4]
  assert _ordered(order.later_twins_last, *twins, dedup_shared_tokens=20) == [0, 2, 4, 1, 3]
  assert admitted(schedule(view(*twins), policy_config("dedup"))) == [4, 0, 2, 3, 1]
  assert admitted(schedule(view(*twins), policy_config("longest_prefix"))) == [4, 0, 1, 2, 3]


def test_prefetch_policies():
  late = waits(0, prefetch=PrefetchView(100, 300, 5.0))
  endless = waits(1, prefetch=PrefetchView(100, 300, None))
  done = waits(2, prefetch=PrefetchView(300, 300, 4.0))
  plain = waits(3)

  def ready(policy, now_s):
    round_ = Round(view(late, endless, done, plain, now_s=now_s), SchedulerConfig(prefetch=policy))
    return order.ready(round_), round_.wake_at_s

  assert ready("best_effort", 1.0) == ([0, 1, 2, 3], None)
  assert ready("wait_complete", 9.0) == ([2, 3], None)
  assert ready("timeout", 1.0) == ([2, 3], 5.0)
  assert ready("timeout", 5.0) == ([0, 2, 3], None)


def test_the_earliest_deadline_is_the_time_to_wake_up():
  waiting = [
    waits(i, prefetch=PrefetchView(0, 300, at_s)) for i, at_s in enumerate((7.0, 5.0, 9.0))
  ]
  plan = schedule(view(*waiting, now_s=1.0), SchedulerConfig(prefetch="timeout"))
  assert (plan.prefill, plan.wake_at_s) == ((), 5.0)


def test_prefetch_by_cost_waits_while_reading_is_cheaper_than_computing():
  late = waits(0, (1, 100, "host"), (2, 200, "storage"), prefetch=PrefetchView(100, 300, 5.0))
  endless = waits(1, (1, 100, "host"), (2, 200, "storage"), prefetch=PrefetchView(100, 300, None))

  def ready(now_s=1.0, **costs):
    state = view(late, endless, now_s=now_s, costs=Costs(**costs))
    round_ = Round(state, SchedulerConfig(prefetch="cost"))
    return order.ready(round_), round_.wake_at_s

  assert ready(prefetch_s_per_token=1e-4, compute_s_per_token=1e-3) == ([], 5.0)
  assert ready(5.0, prefetch_s_per_token=1e-4, compute_s_per_token=1e-3) == ([0], None)
  assert ready(prefetch_s_per_token=1e-3, compute_s_per_token=1e-4) == ([0, 1], None)
  assert ready(prefetch_s_per_token=1e-4) == ([0, 1], None)  # unknown costs
  attention = {"compute_s_per_token": 1e-9, "compute_s_per_token_context": 1e-6}
  assert ready(prefetch_s_per_token=1e-4, **attention) == ([], 5.0)


def test_waiting_for_a_prefetch_is_not_counted_as_bypassed():
  late = waits(0, prefetch=PrefetchView(0, 300, None))
  plan = schedule(view(late, waits(1)), SchedulerConfig(prefetch="wait_complete"))
  assert (admitted(plan), plan.bypassed, plan.cancel_prefetch) == ([1], (), ())
  plan = schedule(view(late, waits(1)), SchedulerConfig())
  assert (admitted(plan), plan.cancel_prefetch) == ([0, 1], (0,))
