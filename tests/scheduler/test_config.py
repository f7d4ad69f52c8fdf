import math

import pytest

from strata_jax.scheduler.config import SchedulerConfig


@pytest.mark.parametrize(
  "wrong",
  [
    {"order": "random"},
    {"ratio_threshold": "measured"},
    {"ratio_threshold": -1.0},
    {"max_bypasses": 0},
    {"max_deferrals": math.nan},
    {"load_or_compute": "both"},
    {"min_load_tokens": 1.5},
    {"deferral": "yes"},
  ],
)
def test_wrong_values_name_the_field(wrong):
  with pytest.raises(ValueError, match=f"SchedulerConfig.{next(iter(wrong))}: expected"):
    SchedulerConfig(**wrong)


def test_thresholds_may_be_infinite():
  config = SchedulerConfig(ratio_threshold=math.inf, max_bypasses=math.inf)
  assert config.ratio_threshold == config.max_bypasses == math.inf
