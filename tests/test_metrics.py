import numpy as np
import pytest

from strata_jax import metrics
from strata_jax.metrics import RequestRecord, ServingResult, StepRow


def _record(request_id=0, **fields):
  fields = {
    "outcome": "finished",
    "arrival_s": 1.0,
    "dispatched_s": 1.5,
    "admitted_s": 2.0,
    "first_token_s": 4.0,
    "over_s": 6.0,
    "output_ids": [7, 8, 9],
  } | fields
  record = RequestRecord(request_id, fields.pop("prompt_tokens", 100))
  for name, value in fields.items():
    setattr(record, name, value)
  return record


def _step(**fields):
  return StepRow(**(dict.fromkeys(StepRow._fields, 0) | fields))


def test_the_waterfall_adds_up_to_the_ttft():
  row = _record(stall_s=0.5, compute_s=1.0).row()
  assert row["client_s"] + row["queue_s"] + row["prefill_s"] == row["ttft_s"] == 3.0
  assert row["decode_s"] == 2.0
  assert row["tpot_s"] == 1.0
  assert row["output_tokens"] == 3
  assert _record(output_ids=[7]).row()["tpot_s"] is None


def test_a_refused_request_has_no_times():
  record = _record(outcome="refused", admitted_s=None, first_token_s=None, output_ids=[])
  row = record.row()
  assert row["ttft_s"] is row["prefill_s"] is row["decode_s"] is row["tpot_s"] is None
  assert row["late_hit_tokens"] == 0


def test_late_hits_are_what_neither_admission_nor_compute_explains():
  record = _record(device_hit_tokens=16, host_hit_tokens=32, computed_tokens=40)
  assert record.late_hit_tokens == 12
  # Computed again after a preemption, the rest of the prompt and 5 generated tokens with it.
  record = _record(device_hit_tokens=60, computed_tokens=40 + 105, recomputed_tokens=105)
  assert record.late_hit_tokens == 0


def test_summary_counts_finished_requests_only():
  result = ServingResult(
    requests=[
      _record(0, device_hit_tokens=40, computed_tokens=60),
      _record(1, arrival_s=3.0, first_token_s=5.0, over_s=11.0, host_hit_tokens=10),
      _record(2, outcome="aborted", prompt_tokens=1000, device_hit_tokens=1000),
      _record(3, outcome="refused", prompt_tokens=1000),
    ],
    steps=[_step(compute_s=2.0, stall_s=1.0, load_tokens=10)],
    load_busy_s=0.5,
    bubble_s=1.0,
    parked_stall_s=1.0,
    plans=9,
    stale=1,
    ended_s=12.0,
  )
  summary = metrics.summarize(result, token_bytes=10**9, slo_ttft_s=2.5)
  assert (summary["requests"], summary["finished"]) == (4, 2)
  assert (summary["aborted"], summary["refused"]) == (1, 1)
  assert summary["ttft_mean_s"] == 2.5
  assert summary["ttft_p50_s"] == 2.5
  assert summary["ttft_from_dispatch_mean_s"] == 3.0
  assert summary["tpot_mean_s"] == 2.0
  assert summary["requests_per_s"] == 0.2
  assert summary["goodput_rps"] == 0.1
  assert summary["output_tokens"] == 6
  assert summary["output_tokens_per_s"] == 0.6
  assert summary["prompt_tokens"] == 200
  assert summary["hit_ratio"] == 0.25
  assert summary["load_gbps"] == 20.0
  assert summary["stall_fraction"] == 0.4  # 2 of 2 + 1 + 1 + 1
  assert summary["bubble_fraction"] == 0.2
  assert summary["jain_fairness"] == pytest.approx(25 / 26)
  assert summary["drain_s"] == 8.0
  assert summary["saturated"] is True
  assert summary["stale"] == 1
  assert metrics.summarize(result, drain_limit_s=8.0)["saturated"] is False
  result.closed_loop = True
  assert metrics.summarize(result)["saturated"] is None


def test_an_empty_run_has_a_summary():
  summary = metrics.summarize(ServingResult(requests=[], steps=[]))
  assert summary["ttft_mean_s"] is summary["hit_ratio"] is summary["requests_per_s"] is None
  assert summary["stall_fraction"] == 0.0
  assert summary["jain_fairness"] is None


def test_fairness_is_between_tenants_if_there_are_several():
  def run(*tenants):
    records = [_record(i, arrival_s=4.0 - ttft) for i, (_, ttft) in enumerate(tenants)]
    for record, (tenant, _) in zip(records, tenants, strict=True):
      record.tenant = tenant
    return metrics.summarize(ServingResult(requests=records, steps=[]))["jain_fairness"]

  assert run(("a", 1.0), ("a", 3.0)) == pytest.approx(16 / 20)
  assert run(("a", 1.0), ("a", 3.0), ("b", 2.0)) == pytest.approx(1.0)


def test_jain():
  assert metrics.jain(np.ones(4)) == 1.0
  assert metrics.jain(np.array([1.0, 0, 0, 0])) == 0.25
  assert metrics.jain(np.zeros(2)) is None


def test_outputs_are_identical_up_to_the_first_near_tie():
  a = [_record(0, output_ids=[1, 2, 3]), _record(1, output_ids=[4, 5])]
  assert metrics.identical_outputs(a, a) == (True, [])
  b = [_record(0, output_ids=[1, 2, 9]), _record(1, output_ids=[4, 5])]
  assert metrics.identical_outputs(a, b) == (False, [0])
  b[0].near_ties = [2]
  assert metrics.identical_outputs(a, b) == (True, [])
  assert metrics.identical_outputs(b, a) == (True, [])
  b[0].near_ties = [3]
  assert metrics.identical_outputs(a, b) == (False, [0])
  b = [_record(0, output_ids=[1, 2]), _record(1, output_ids=[4, 5])]
  assert metrics.identical_outputs(a, b) == (False, [0])
  with pytest.raises(ValueError, match="the same requests"):
    metrics.identical_outputs(a, a[:1])


def test_a_refusal_in_one_run_is_a_difference():
  a, b = _record(0), _record(0, outcome="refused", output_ids=[])
  a.near_ties = [0]
  assert metrics.identical_outputs([a], [b]) == (False, [0])
