import time

from experiments import control_plane_schedule
from strata_jax import testing
from strata_jax.scheduler.config import SchedulerConfig
from strata_jax.scheduler.policies import POLICIES, policy_config, schedule


def test_the_view_exercises_every_mechanism():
  view = control_plane_schedule.schedule_view(128)
  assert len(view.waiting) == 128
  plan = schedule(view, SchedulerConfig())
  testing.check_plan(view, plan)
  assert plan.prefill
  assert plan.bundled
  assert plan.decode
  roomy = SchedulerConfig(bundles=False)
  assert len(schedule(view, roomy).prefill) == 16


def test_measure_names_what_it_measures():
  found = control_plane_schedule.measure((8,), repeats=1)
  assert set(found) == {"schedule_8_median_us", "schedule_8_p99_us"}
  assert 0 < found["schedule_8_median_us"] <= found["schedule_8_p99_us"]


def test_growth_is_no_worse_than_n_log_n():
  """Best of several runs, so that other load on the machine does not matter."""

  def best_s(view, config) -> float:
    times = []
    for _ in range(7):
      began_s = time.perf_counter()
      schedule(view, config)
      times.append(time.perf_counter() - began_s)
    return min(times)

  few, many = (control_plane_schedule.schedule_view(n) for n in (128, 4096))
  for name in POLICIES:
    config = policy_config(name)
    # n log n gives 55, n squared 1,024.
    assert best_s(many, config) < 150 * best_s(few, config), name
