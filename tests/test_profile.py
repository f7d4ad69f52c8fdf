import json

import pytest

from strata_jax import profile as profiles
from strata_jax.config import MODELS


def copy_profile(tmp_path, change=lambda profile, hardware: None):
  """The 8B profile and its hardware file, changed, in a folder of their own."""
  source = profiles.FOLDER / "h200_llama31_8b.json"
  profile = json.loads(source.read_text())
  hardware = json.loads((profiles.FOLDER / profile["hardware"]).read_text())
  change(profile, hardware)
  (tmp_path / profile["hardware"]).write_text(json.dumps(hardware))
  (tmp_path / "p.json").write_text(json.dumps(profile))
  return tmp_path


@pytest.mark.parametrize("name", profiles.names())
def test_every_number_has_a_kind_and_a_source(name):
  profile = profiles.load(name)
  numbers = list(profiles.numbers(profile))
  assert len(numbers) > 40
  assert all(kind in profiles.KINDS and source for _, kind, source in numbers)
  assert profile.device_kv_tokens > 100_000
  assert profile.host_kv_tokens > profile.device_kv_tokens


def test_the_issued_set_of_profiles_is_there():
  assert set(profiles.names()) >= {
    "h200_llama31_8b", "h200_qwen25_14b_1m", "h200_llama31_70b_tp4", "a100_pcie4_llama31_8b",
    "gh200_llama31_8b", "h200_mistral_24b", "h200_qwen3_32b", "h200_deepseek_v3_tp8",
  }  # fmt: skip


def test_other_files_of_a_folder_are_no_profiles(tmp_path):
  for name in ("hardware_mine", "mine_llama31_8b", "config", "summary", "mine"):
    (tmp_path / f"{name}.json").write_text("{}")
  assert profiles.names(tmp_path) == ["mine_llama31_8b"]


@pytest.mark.parametrize(
  ("name", "model"),
  [
    ("h200_llama31_8b", "llama31_8b"),
    ("h200_qwen25_14b_1m", "qwen25_14b_1m"),
    ("h200_llama31_70b_tp4", "llama31_70b"),
  ],
)
def test_shapes_agree_with_the_model_presets(name, model):
  shape, config = profiles.load(name).model, MODELS[model]
  hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.kv_heads
  width = config.head_dim
  layer = 2 * hidden * width * (heads + kv_heads) + 3 * hidden * config.intermediate_size
  assert shape.num_layers == config.num_layers
  assert shape.layer_params == config.num_layers * layer
  assert shape.head_params == config.vocab_size * hidden
  assert shape.kv_bytes_token_layer == config.page_layout(1).fragment_bytes
  assert shape.attention_flops_token_context_layer == 4 * heads * width


def test_link_rates_are_the_measured_ones_and_interpolate_between_them():
  load = profiles.load("h200_llama31_8b").load
  assert load.kernel[2].bytes_per_s(4096) == pytest.approx(50.6e9)
  assert load.kernel[1].bytes_per_s(2048) == pytest.approx(37.7e9)
  assert load.copies["memcpy_async"].bytes_per_s(65536) == pytest.approx(14.0e9)
  assert load.copies["memcpy_batch"].bytes_per_s(131072) == pytest.approx(45.3e9)
  between = load.copies["memcpy_async"].bytes_per_s(32768)
  assert 4.8e9 < between < 14.0e9
  # Half the smallest fragment costs as much as the smallest; beyond the largest nothing changes.
  assert load.kernel[2].bytes_per_s(512) == pytest.approx(50.5e9 / 2)
  assert load.copies["memcpy_async"].bytes_per_s(1 << 24) == pytest.approx(47.6e9)


def test_an_unknown_name_lists_the_known_ones():
  with pytest.raises(ValueError, match=r"expected one of .*h200_llama31_8b"):
    profiles.load("h300_llama")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda p, h: h.update(speed={"value": 1}), "unknown keys"),
    (lambda p, h: p["model"].update(layers=p["devices"]), "unknown keys"),
    (lambda p, h: h["gate_s"].pop("source"), "expected value, kind and source"),
    (lambda p, h: h["gate_s"].update(kind="guessed"), "expected a kind of measured"),
    (lambda p, h: h["gate_s"].update(value=-1), "expected a number >= 0"),
    (lambda p, h: h["load"]["memcpy_async"].update(points=[[4, 1], [2, 1]]), "by growing size"),
    (lambda p, h: h["memory_bytes"].update(value=1e9), "leave room"),
    (lambda p, h: h.pop("gate_s"), "expected value, kind and source"),
  ],
)
def test_a_bad_profile_is_refused(tmp_path, change, message):
  with pytest.raises(ValueError, match=message):
    profiles.load("p", copy_profile(tmp_path, change))


def test_a_good_copy_loads(tmp_path):
  assert profiles.load("p", copy_profile(tmp_path)).devices == 1


def _sharing(value):
  leaf = {"value": value, "kind": "measured", "source": "a run"}
  return lambda profile, hardware: hardware.update(executor={"decode_shares": leaf})


def test_rows_that_read_together_are_a_number_of_the_executor(tmp_path):
  assert all(profiles.load(name).executor.decode_shares == 1 for name in profiles.names())
  assert profiles.load("p", copy_profile(tmp_path, _sharing(2))).executor.decode_shares == 2
  for value in (0, 1.5):
    copy_profile(tmp_path, _sharing(value))
    message = rf"hardware_h200\.json, executor: .*decode_shares: expected an integer .*{value}"
    with pytest.raises(ValueError, match=message):
      profiles.load("p", tmp_path)
