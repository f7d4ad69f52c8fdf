import dataclasses
import math

import numpy as np
import pytest

from strata_jax import profile as profiles
from strata_jax import simulation, systems
from strata_jax.config import ServingConfig
from strata_jax.cost_model import CostModel, IoConfig
from strata_jax.scheduler.policies import schedule
from strata_jax.systems import SYSTEMS, SystemConfig
from strata_jax.workloads.request import Request
from strata_jax.workloads.workload import Workload
from tests.scheduler.build import admitted, budgets, view, waits

NAMED = (
  "paged_attention", "sglang_device", "sglang_device_lpm", "hicache_paper", "hicache_paper_lpm",
  "hicache_batch", "hicache_batch_lpm", "device_put", "hicache_today_like",
  "hicache_today_like_lpm", "vllm_lmcache_like", "trtllm_like", "ct_hpkv_like", "mooncake_like",
  "strata", "strata_selective", "strata_io", "strata_io_lpm", "strata_schedule_only",
  "strata_auto", "strata_paper", "oracle_io", "oracle_cache", "recompute",
)  # fmt: skip


def test_every_preset_is_there_and_says_what_it_is():
  assert set(NAMED) <= set(SYSTEMS)
  for name, system in SYSTEMS.items():
    assert system.name == name
    for field in ("description", "source", "version"):
      assert getattr(system, field), f"{name}.{field}"


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_preset_schedules(name):
  twins = [waits(i, (1, 4_096, "host"), (2, 1_024, "in_queue"), tail=9) for i in range(3)]
  system = SYSTEMS[name]
  sized = budgets(page_size=system.page_size)
  plan = schedule(view(*twins, budgets=sized), system.scheduler_config)
  defers = system.policy in ("strata", "strata_paper")
  assert admitted(plan) == ([0] if defers else [0, 1, 2]) or system.policy == "dedup"


def test_pages_of_the_baseline():
  sizes = {SYSTEMS[f"hicache_paper_{size}"].page_size for size in (64, 128, 256, 512, 1024)}
  assert sizes | {SYSTEMS["hicache_paper"].page_size} == {32, 64, 128, 256, 512, 1024}


def test_public_hicache_stages_its_write_back():
  # Pages are gathered on the device and leave in large copies, not one copy a layer and page.
  for name in ("hicache_today_like", "hicache_today_like_lpm"):
    assert (SYSTEMS[name].load_backend, SYSTEMS[name].store_backend) == ("kernel", "copy_engine")
  profile = profiles.load("h200_llama31_8b")
  staged = CostModel(profile, simulation.io_config(SYSTEMS["hicache_today_like"])).backup_rate
  by_page = IoConfig(page_size=1, store_backend="memcpy_batch")
  assert staged > 10 * CostModel(profile, by_page).backup_rate


def test_ablations_differ_from_strata_in_one_thing():
  io, full = SYSTEMS["strata_io"], SYSTEMS["strata"]
  assert _differences(io, full) == {"policy"}
  assert _differences(SYSTEMS["strata_selective"], full) == {"write_policy"}
  assert _differences(SYSTEMS["strata_auto"], full) == {"page_size", "load_backend", "scheduler"}
  assert "policy" not in _differences(SYSTEMS["strata_schedule_only"], full)
  schedule_only = _differences(SYSTEMS["strata_schedule_only"], SYSTEMS["hicache_paper"])
  assert schedule_only == {"policy"}
  limits = SYSTEMS["strata_paper"].scheduler_config
  assert limits.max_bypasses == limits.max_deferrals == limits.max_postponements == math.inf
  for name in ("strata_paper", "strata_io"):
    auto = dataclasses.replace(SYSTEMS["strata_auto"], policy=SYSTEMS[name].policy)
    assert auto.scheduler_config.order == "fcfs"


def test_device_put_is_the_baseline_by_other_means():
  changed = _differences(SYSTEMS["device_put"], SYSTEMS["hicache_paper"])
  assert changed == {"load_backend", "store_backend", "separate_kv_copies", "overlap"}


def _differences(first: SystemConfig, second: SystemConfig) -> set[str]:
  about = ("name", "description", "source", "version", "not_modelled")
  return {
    field.name
    for field in dataclasses.fields(SystemConfig)
    if field.name not in about and getattr(first, field.name) != getattr(second, field.name)
  }


def test_what_follows_from_the_data_path():
  assert not SYSTEMS["vllm_lmcache_like"].scheduler_config.layerwise
  assert SYSTEMS["strata"].scheduler_config.layerwise
  assert SYSTEMS["hicache_today_like"].scheduler_config.min_load_tokens == 10
  assert SYSTEMS["ct_hpkv_like"].tiers == ("device", "host", "storage")
  assert SYSTEMS["sglang_device"].tiers == ("device",)


def test_prefetch_timeout():
  def limit_s(name, tokens):
    storage = simulation.storage_config(dataclasses.replace(SYSTEMS[name], storage="private"))
    assert storage is not None
    return storage.prefetch_timeout_s(tokens)

  assert limit_s("hicache_today_like", 10 * 1024) == pytest.approx(3.0)
  assert limit_s("hicache_today_like", 1024 * 1024) == 30.0
  assert limit_s("strata", 1024) == math.inf


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"page_size": 0}, "page_size"),
    ({"overlap": "half"}, "overlap"),
    ({"policy": "best"}, "policy"),
    ({"load_backend": "dma"}, "load_backend"),
    ({"host": False}, "load_backend"),
    ({"min_prefetch_tokens": -1}, "min_prefetch_tokens"),
  ],
)
def test_wrong_values_name_the_field(changes, field):
  with pytest.raises(ValueError, match=rf"SystemConfig\.{field}: expected"):
    dataclasses.replace(SYSTEMS["strata"], **changes)


def test_unknown_system():
  with pytest.raises(ValueError, match="expected one of paged_attention"):
    systems.system("sglang")


def _tangle(seed: int, page_size: int) -> tuple[Workload, int]:
  """Sessions, gaps, salts and clients that give up; the pages that the largest request needs."""
  rng = np.random.default_rng(seed)
  documents = [rng.integers(0, 2000, rng.integers(1, 300), dtype=np.int32) for _ in range(4)]
  requests: list[Request] = []
  for i in range(24):
    document = documents[rng.integers(4)]
    tail = rng.integers(0, 2000, rng.integers(1, 12), dtype=np.int32)
    prompt = np.concatenate([document[: rng.integers(0, len(document) + 1)], tail])
    fields: dict = {"arrival_s": float(rng.uniform(0, 0.3))}
    if requests and rng.random() < 0.25:
      before = requests[rng.integers(len(requests))]
      prompt = np.concatenate([before.prompt_ids, before.forced_output_ids, tail])
      fields = {"follows": before.request_id, "think_s": float(rng.choice([0.0, 0.02]))}
    if rng.random() < 0.25:
      fields["abort_s"] = float(rng.choice([0.0, 0.001, 0.02, 0.2]))
    requests.append(
      Request(
        request_id=i, prompt_ids=prompt, salt=str(rng.choice(["", "a"])), **fields,
        forced_output_ids=rng.integers(2000, 3000, rng.choice([0, 1, 7, 60]), dtype=np.int32),
      )
    )  # fmt: skip
  largest = max(len(r.prompt_ids) + max(len(r.forced_output_ids) - 1, 0) for r in requests)
  return Workload(name="tangle", requests=tuple(requests)), -(-largest // page_size)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_ends_in_a_pool_that_just_holds_the_largest_request(name, seed):
  page_size = min(SYSTEMS[name].page_size, 32)
  system = simulation.system_with(SYSTEMS[name], {"page_size": page_size})
  workload, pages = _tangle(seed, page_size)
  plans = []

  def count(view, plan):
    plans.append(plan)
    assert len(plans) < 10_000, "the loop does not end"

  run = simulation.simulate(
    workload,
    simulation.find_profile("h200", "llama31_8b"),
    system,
    pools=simulation.PoolSizes(device_tokens=pages * page_size, host_tokens=2 * pages * page_size),
    serving=ServingConfig(
      requests_in_flight=20, running_requests=6, batch_requests=3, step_tokens=64, decode_steps=4
    ),
    recorder=count,
  )
  run.controller.check()
  assert run.result.deadlocks == run.controller.stats.stale_entries == 0
  for request, record in zip(workload.requests, run.result.requests, strict=True):
    assert record.outcome == "finished" or request.abort_s is not None
    if record.outcome == "finished":
      assert record.output_ids == request.forced_output_ids.tolist()
