"""What programs that time the executor share: checks of sizes, and a tiny model without a GPU."""

import dataclasses
import pathlib
from typing import Any

import jax

from experiments import flags, run_folder, serve_setup
from strata_jax import config as config_lib
from strata_jax import validation

_SMALLER = "without a GPU flags that are not given have the values of a tiny run"


def check(config: Any) -> None:
  """Raises ValueError: a model that is no preset, integers below 1 that are no seed."""
  validation.check_choice(config, "model", tuple(config_lib.MODELS))
  validation.check_ints(config, "layers_per_program", minimum=1)
  for field in dataclasses.fields(config):
    if field.type is int and field.name != "seed":
      validation.check_int(config, field.name, minimum=1)


def begin(args: flags.Args, name: str, config_class: type, tiny: Any) -> tuple[Any, pathlib.Path]:
  """The config, without a GPU on top of a tiny one, and the folder of the run, which notes it.

  Raises:
    UsageError: a flag that the config refuses, or a folder that cannot be made.
  """
  serve_setup.share_the_interpreter()
  on_gpu = jax.default_backend() == "gpu"
  try:
    config = args.config(config_class, base=None if on_gpu else tiny)
  except flags.UsageError as error:
    raise error if on_gpu else flags.UsageError(f"{error} ({_SMALLER})") from error
  with flags.usage_errors():
    out = run_folder.open_run(args.out, {name: config, "seed": config.seed})
  if not on_gpu:
    run_folder.say(f"No GPU: {config.model} runs, and {_SMALLER}. Times mean nothing.")
  return config, out
