import dataclasses

import pytest

from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.defer import delay_hits
from strata_jax.scheduler.policies import schedule
from strata_jax.scheduler.round import Round
from strata_jax.scheduler.views import Producer
from tests.scheduler.build import admitted, deferred, view, waits


@pytest.mark.parametrize(("tokens", "waits_on"), [(100, None), (101, (2,))])
def test_a_run_longer_than_the_threshold(tokens, waits_on):
  one = view(waits(0, (1, 500, "device"), (2, tokens, "in_flight"), (3, 50, "in_queue")))
  found = delay_hits(round_ := Round(one, SchedulerConfig()), round_.candidate(0))
  assert (found and found.waits_on) == waits_on


def test_a_run_of_in_flight_and_claimed_spans_counts_together():
  one = view(waits(0, (1, 60, "in_flight"), (2, 60, "in_queue"), (3, 900, "in_queue")))
  round_ = Round(one, SchedulerConfig())
  assert delay_hits(round_, round_.candidate(0)) is None
  round_.claims.add(2)
  assert delay_hits(round_, round_.candidate(0)) == (0, "claimed", (1, 2))


def test_storage_nodes_that_are_being_computed_count():
  one = view(waits(0, (1, 300, "storage")), in_flight={1: Producer(7, 300)})
  round_ = Round(one, SchedulerConfig())
  assert delay_hits(round_, round_.candidate(0)) == (0, "in_flight", (1,))


def test_claims_grow_while_the_batch_is_formed():
  """2 shares nothing with 0 but with 1, which is chosen before it."""
  one = view(
    waits(0, (1, 200, "in_queue")), waits(1, (2, 200, "in_queue")), waits(2, (2, 200, "in_queue"))
  )
  plan = schedule(one, SchedulerConfig())
  assert (admitted(plan), deferred(plan)) == ([0, 1], [2])


def test_a_bundle_hit_passes_the_deferral_test_too():
  """1 shares the head's loads, and what the head computes."""
  path = ((1, 5_000, "host"), (2, 500, "in_queue"))
  plan = schedule(view(waits(0, *path), waits(1, *path)), SchedulerConfig())
  assert (admitted(plan), deferred(plan), plan.bundled) == ([0], [1], ())


def test_the_postponed_pass_the_deferral_test_again_when_there_is_room_for_them():
  """1 would load too much; 2, chosen after that, computes what 1 could hit."""
  path = ((1, 60_000, "host"), (2, 500, "in_queue"))
  plan = schedule(view(waits(0), waits(1, *path), waits(2, *path, tail=1_000)), SchedulerConfig())
  assert (admitted(plan), deferred(plan), plan.postponed) == ([0, 2], [1], ())


def test_what_the_deferred_hit_is_kept_from_eviction():
  """The hit of 1 holds 300 evictable pages: 2 would need them."""
  twin = ((1, 300, "device"), (2, 200, "in_queue"))
  one = view(
    waits(0, (2, 200, "in_queue")),
    waits(1, *twin),
    waits(2, tail=250),
    free_pages=300,
    evictable_pages=300,
  )
  assert admitted(schedule(one, SchedulerConfig())) == [0]
  config = SchedulerConfig(deferral=False)
  assert admitted(schedule(dataclasses.replace(one, waiting=one.waiting[::2]), config)) == [0, 2]
  twins = (*one.waiting[:2], waits(2, *twin), waits(3, tail=90))  # both hits are the same pages
  plan = schedule(dataclasses.replace(one, waiting=twins), SchedulerConfig())
  assert (admitted(plan), deferred(plan)) == ([0, 3], [1, 2])
