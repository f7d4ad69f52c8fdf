import dataclasses

import pytest

from strata_jax import config as config_lib
from strata_jax.executors import choices

BFLOAT16 = config_lib.MODELS["llama31_8b"]
FLOAT32 = dataclasses.replace(BFLOAT16, dtype="float32")


@pytest.mark.parametrize(
  ("model", "on_gpu", "chosen"),
  [(BFLOAT16, True, "cudnn"), (BFLOAT16, False, "xla"), (FLOAT32, True, "xla")],
)
def test_attention(model, on_gpu, chosen):
  page_layout = model.page_layout(16)
  assert choices.choose_attention("auto", model, page_layout, on_gpu) == chosen
  assert choices.choose_attention("reference", model, page_layout, on_gpu) == "reference"
  if chosen == "cudnn":
    assert choices.choose_attention("cudnn", model, page_layout, on_gpu) == "cudnn"
  else:
    with pytest.raises(ValueError, match="attention 'cudnn': expected a GPU, and bfloat16"):
      choices.choose_attention("cudnn", model, page_layout, on_gpu)


def test_attention_on_a_hopper_gpu():
  def choose(name, model=BFLOAT16, page_size=16, on_hopper=True):
    page_layout = model.page_layout(page_size)
    return choices.choose_attention(name, model, page_layout, True, on_hopper=on_hopper)

  assert choose("auto") == choose("hopper") == "hopper"
  assert choose("cudnn") == "cudnn"
  assert choose("auto", page_size=1) == "cudnn"  # of which the kernel has none
  assert choose("auto", on_hopper=False) == "cudnn"
  assert choose("auto", model=FLOAT32) == "xla"
  for wrong in ({"page_size": 1}, {"on_hopper": False}, {"model": FLOAT32}):
    with pytest.raises(ValueError, match="attention 'hopper': expected a Hopper GPU"):
      choose("hopper", **wrong)


def test_rows_that_read_together():
  assert choices.decode_shares("hopper", BFLOAT16) == 2
  assert choices.decode_shares("hopper", config_lib.MODELS["smollm2_135m"]) == 4
  assert choices.decode_shares("cudnn", BFLOAT16) == 1


def test_pages_of_another_dtype_are_not_for_cudnn():
  page_layout = BFLOAT16.page_layout(16, "float32")
  assert choices.choose_attention("auto", BFLOAT16, page_layout, True) == "xla"


@pytest.mark.parametrize(
  ("io", "on_gpu", "chosen"),
  [
    ("kernel", True, "layer"),
    ("auto", True, "layer"),
    ("copy_engine", True, "layer"),
    ("device_put", True, "whole"),
    ("auto", False, "whole"),
  ],
)
def test_overlap(io, on_gpu, chosen):
  assert choices.choose_overlap("auto", io, on_gpu) == chosen
  assert choices.choose_overlap("whole", io, on_gpu) == "whole"
  if io == "device_put":
    with pytest.raises(ValueError, match=r"overlap 'layer': expected .* got 'device_put'"):
      choices.choose_overlap("layer", io, on_gpu)
  else:
    assert choices.choose_overlap("layer", io, on_gpu) == "layer"
