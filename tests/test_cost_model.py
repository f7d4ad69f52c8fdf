import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from strata_jax import config as config_lib
from strata_jax import profile as profiles
from strata_jax.cost_model import CostModel, IoConfig
from strata_jax.executors import choices
from strata_jax.executors.buckets import Buckets

PROFILE = profiles.load("h200_llama31_8b")


def model(name="h200_llama31_8b", **io):
  return CostModel(PROFILE if name == "h200_llama31_8b" else profiles.load(name), IoConfig(**io))


def test_a_cold_prompt_costs_its_products():
  costs = model()
  tokens = 20_000
  hardware, shape = PROFILE.hardware, PROFILE.model
  matmul = 2 * shape.layer_params * tokens / (hardware.matmul_flops * hardware.matmul_efficiency)
  attention = 32 * 4 * 4096 * tokens**2 / 2 / hardware.attention_flops
  head = shape.head_params * 2 / hardware.weight_read_bytes_per_s
  expected = matmul + attention + head + hardware.pass_overhead_s
  assert costs.prefill_s([(tokens, 0)]) == pytest.approx(expected)


def test_decode_reads_weights_and_kv():
  costs = model()
  hardware, shape = PROFILE.hardware, PROFILE.model
  weights = (shape.layer_params + shape.head_params) * 2 / hardware.weight_read_bytes_per_s
  kv = 131072 * 640_000 / hardware.attention_read_bytes_per_s
  expected = weights + kv + hardware.pass_overhead_s
  assert costs.decode_step_s(32, 640_000) == pytest.approx(expected)


@hypothesis.given(
  new=st.integers(1, 8192), context=st.integers(0, 100_000), more=st.integers(1, 5000)
)
def test_more_work_never_costs_less(new, context, more):
  costs = model()
  base = costs.prefill_s([(new, context)])
  assert costs.prefill_s([(new + more, context)]) >= base
  assert costs.prefill_s([(new, context + more)]) >= base
  assert costs.prefill_s([(new, context), (more, 0)]) >= base
  assert costs.decode_step_s(4, context + more) > costs.decode_step_s(4, context)
  assert costs.load_s(new + more) > costs.load_s(new)


@hypothesis.given(tokens=st.integers(2, 8192), context=st.integers(0, 50_000), data=st.data())
def test_chunks_cost_at_least_the_whole(tokens, context, data):
  cut = data.draw(st.integers(1, tokens - 1))
  costs = model()
  chunks = costs.prefill_s([(cut, context)]) + costs.prefill_s([(tokens - cut, context + cut)])
  assert chunks >= costs.prefill_s([(tokens, context)]) * (1 - 1e-12)


@pytest.mark.parametrize(
  ("io", "gbps"),
  [
    ({"page_size": 32, "load_backend": "memcpy_async", "separate_kv_copies": True}, 14.0),
    ({"page_size": 32, "load_backend": "memcpy_batch"}, 45.3),
    ({"page_size": 1, "load_backend": "kernel"}, 50.6),
    ({"page_size": 1, "load_backend": "copy_engine"}, 45.3),
    ({"page_size": 1, "load_backend": "memcpy_batch"}, 2.3),
    ({"page_size": 1, "load_backend": "auto"}, 50.6),
  ],
)
def test_load_rates_of_the_systems(io, gbps):
  assert model(**io).load_rate == pytest.approx(gbps * 1e9)


def test_backups_pick_the_faster_path():
  assert model(store_backend="kernel").backup_rate == pytest.approx(40.5e9)
  assert model(store_backend="auto").backup_rate == pytest.approx(45.3e9)


def test_tensor_parallel_devices_share_the_bytes_over_links_of_their_own():
  one, four = profiles.load("h200_llama31_70b_tp4"), model("h200_llama31_70b_tp4")
  assert four.token_bytes() == one.kv_bytes_token / 4
  # A fragment of a device is a quarter: 1 KiB.
  assert four.load_rate == pytest.approx(50.5e9)


def test_latent_kv_is_whole_on_every_device():
  costs = model("h200_deepseek_v3_tp8")
  assert costs.token_bytes() == 61 * 576 * 2


def test_experts_touched_grow_with_the_batch():
  costs = model("h200_deepseek_v3_tp8")
  assert costs.decode_step_s(64, 64) > 2 * costs.decode_step_s(1, 1)


def test_free_loads_cost_nothing_and_the_policy_is_told():
  free, real = model(load_is_free=True), model()
  assert free.load_s(10**6) == 0.0 == free.costs().load_s_per_token
  assert real.costs().load_s_per_token == pytest.approx(131072 / 50.6e9)
  assert real.load_s(0) == 0.0 == real.backup_s(0)


def test_a_kernel_without_a_cap_disturbs_more_and_a_copy_engine_less():
  capped, uncapped = model().interference, model(capped_blocks=False).interference
  copies = model(load_backend="memcpy_async").interference
  assert copies.prefill < capped.prefill < uncapped.prefill
  assert copies.decode < capped.decode < uncapped.decode


def test_an_unknown_back_end_is_refused():
  with pytest.raises(ValueError, match=r"IoConfig\.load_backend: expected one of"):
    IoConfig(load_backend="dma")


BUCKETS = Buckets(
  chunk_tokens=(32, 128), decode_requests=(32,), transfer_pages=(64,), table_pages=900,
  prefill_rows=(1, 4), joint_tokens=128,
)  # fmt: skip


@pytest.mark.parametrize("buckets", [None, BUCKETS])
@pytest.mark.parametrize("name", ["h200_llama31_8b", "h200_llama31_70b_tp4"])
def test_a_joint_pass_reads_the_weights_once(name, buckets):
  machine = profiles.load(name)
  costs = CostModel(machine, IoConfig(), buckets)
  hardware, shape = machine.hardware, machine.model
  chunks = [(20, 4000), (25, 9000)]
  apart_s = costs.prefill_s(chunks) + costs.decode_step_s(8, 64_000)
  weights_s = (
    shape.layer_params
    * shape.weight_item_bytes
    / (hardware.weight_read_bytes_per_s * machine.devices)
  )
  latency_s = 2 * hardware.allreduce_latency_s * shape.num_layers if machine.devices > 1 else 0.0
  saved_s = weights_s + hardware.pass_overhead_s + latency_s
  assert apart_s - costs.joint_s(chunks, 8, 64_000) == pytest.approx(saved_s)


@hypothesis.given(
  chunks=st.lists(st.tuples(st.integers(1, 32), st.integers(0, 50_000)), min_size=1, max_size=4),
  requests=st.integers(1, 64), read=st.integers(1, 500_000), padded=st.booleans(),
)  # fmt: skip
def test_a_joint_pass_costs_more_than_either_part_and_no_more_than_both(
  chunks, requests, read, padded
):
  costs = CostModel(PROFILE, IoConfig(), BUCKETS if padded else None)
  joint_s = costs.joint_s(chunks, requests, read)
  parts_s = costs.prefill_s(chunks), costs.decode_step_s(requests, read)
  assert max(parts_s) < joint_s < sum(parts_s)
  assert costs.prefill_s(chunks, 0, 0) == parts_s[0]


def test_overheads_of_a_joint_pass_are_those_of_both_parts():
  executor = dataclasses.replace(PROFILE.executor, chunk_overhead_s=1e-3, decode_request_s=1e-4)
  plain, more = (
    CostModel(machine, IoConfig(), BUCKETS)
    for machine in (PROFILE, dataclasses.replace(PROFILE, executor=executor))
  )
  one, two = (costs.joint_s([(20, 0), (30, 0)], 7, 100) for costs in (plain, more))
  assert two - one == pytest.approx(2e-3 + 7e-4)


@pytest.mark.parametrize(
  ("backend", "page_size", "in_turn"),
  [
    ("kernel", 1, False),
    ("kernel", 32, False),
    ("auto", 1, False),
    ("auto", 2, True),  # pages of 256 KiB
    ("auto", 32, True),
    ("memcpy_async", 1, True),
    ("memcpy_batch", 32, True),
    ("copy_engine", 1, True),
  ],
)
def test_parked_loads_come_in_turn_but_for_those_of_a_kernel(backend, page_size, in_turn):
  io = {"load_backend": backend, "page_size": page_size}
  assert model(**io, overlap="layer").parked_in_turn == in_turn
  assert model(**io, overlap="whole").parked_in_turn
  assert model(**io, overlap="none").parked_in_turn
  if backend == "auto":  # as the executor does it
    page_layout = config_lib.MODELS["llama31_8b"].page_layout(page_size)
    assert (choices.loads_aside(backend, page_layout, on_gpu=True) is not None) == in_turn
