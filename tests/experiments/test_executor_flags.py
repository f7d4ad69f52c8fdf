import pytest

from experiments.executor_flags import IoNames, io_of
from strata_jax.executors import choices
from strata_jax.systems import SYSTEMS
from strata_jax.tiers import io_auto

_GPU = {
  "hicache_paper": IoNames(load="memcpy_async", store="memcpy_async", overlap="layer"),
  "hicache_batch": IoNames(load="copy_engine", store="copy_engine", overlap="layer"),
  "device_put": IoNames(load="device_put", store="device_put", overlap="whole"),
  "hicache_today_like": IoNames(load="kernel", store="copy_engine", overlap="layer"),
  "strata": IoNames(load="kernel", store="auto", overlap="layer"),
  "strata_paper": IoNames(load="kernel", store="kernel", overlap="layer"),
  "strata_schedule_only": IoNames(load="memcpy_async", store="memcpy_async", overlap="layer"),
  "trtllm_like": IoNames(load="kernel", store="kernel", overlap="whole"),
  "sglang_device": IoNames(load="auto", store="auto", overlap="auto"),
}


@pytest.mark.parametrize("name", _GPU)
def test_back_ends_and_overlap_are_the_presets_own(name):
  assert io_of(SYSTEMS[name], on_cpu=False) == _GPU[name]


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_preset_names_what_a_gpu_has(name):
  io = io_of(SYSTEMS[name], on_cpu=False)
  assert io.load in io_auto.NAMES
  assert io.store in io_auto.NAMES
  assert choices.choose_overlap(io.overlap, io.load, True) in choices.OVERLAPS


def test_a_cpu_has_its_own():
  assert io_of(SYSTEMS["strata"], on_cpu=True) == IoNames(
    load="reference", store="reference", overlap="layer"
  )
  assert io_of(SYSTEMS["device_put"], on_cpu=True) == _GPU["device_put"]
  assert io_of(None, on_cpu=False) == IoNames()
