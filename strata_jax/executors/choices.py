"""What an executor runs with, by name, or by what the device can do."""

import jax
import jax.numpy as jnp

from strata_jax import attention, config
from strata_jax.attention import hopper
from strata_jax.cost_model import DRIVER_FRAGMENT_BYTES, DRIVER_PAGE_BYTES
from strata_jax.executors import fragment_copies, gated_loads, side_copies
from strata_jax.tiers import layout

OVERLAPS = ("layer", "whole")
STAGED = "staged"  # see `staged_loads`


def choose_attention(
  name: str,
  model: config.ModelConfig,
  page_layout: layout.PageLayout,
  on_gpu: bool,
  *,
  on_hopper: bool = False,
) -> str:
  """An implementation of attention; `auto` is the fastest that can be.

  That is `hopper` on such a GPU if the kernel takes the model and its pages, else `cudnn` on any
  GPU, in bfloat16 both; else `xla`.

  Raises:
    ValueError: no such implementation, or it cannot be.
  """
  bfloat16 = model.dtype == page_layout.dtype == "bfloat16"
  pool = jax.ShapeDtypeStruct(page_layout.device_shape(1), jnp.dtype(page_layout.dtype))
  by_kernel = on_hopper and bfloat16 and hopper.supports(model.num_heads, pool)
  if name == "auto":
    return "hopper" if by_kernel else "cudnn" if on_gpu and bfloat16 else "xla"
  if name not in attention.IMPLEMENTATIONS:
    names = ", ".join((*attention.IMPLEMENTATIONS, "auto"))
    raise ValueError(f"attention: expected one of {names}, got {name!r}")
  if name == "cudnn" and not (on_gpu and bfloat16):
    raise ValueError(
      "attention 'cudnn': expected a GPU, and bfloat16 for model and pages, got "
      f"{'a GPU' if on_gpu else 'none'}, {model.dtype} and {page_layout.dtype}"
    )
  if name == "hopper" and not by_kernel:
    raise ValueError(
      "attention 'hopper': expected a Hopper GPU, and a model and pages in bfloat16 that its "
      f"kernel takes, got {model.name}, {model.dtype}, with pages of {page_layout.page_size}, "
      f"{page_layout.dtype}, and {'a Hopper GPU' if on_hopper else 'none'}"
    )
  return name


def attention_on(
  device: jax.Device, name: str, model: config.ModelConfig, page_layout: layout.PageLayout
) -> str:
  """`choose_attention` for a device."""
  hopper_gpu = getattr(device, "compute_capability", None) == "9.0"
  on_gpu = device.platform == "gpu"
  return choose_attention(name, model, page_layout, on_gpu, on_hopper=hopper_gpu)


def decode_shares(implementation: str, model: config.ModelConfig) -> int:
  """Rows of a decode batch that read the pages which they have in common once."""
  return hopper.decode_shares(model.num_heads) if implementation == "hopper" else 1


def choose_overlap(name: str, io: str, on_gpu: bool) -> str:
  """One of OVERLAPS; `auto` is by layer on a GPU, where the I/O back end can.

  Raises:
    ValueError: no such overlap, or not with this I/O back end.
  """
  by_layer = ("auto", "kernel", *gated_loads.BACKENDS)
  if name == "auto":
    return "layer" if on_gpu and io in by_layer else "whole"
  if name not in OVERLAPS:
    names = ", ".join((*OVERLAPS, "auto"))
    raise ValueError(f"overlap: expected one of {names}, got {name!r}")
  if name == "layer" and on_gpu and io not in by_layer:
    names = ", ".join(by_layer)
    raise ValueError(f"overlap 'layer': expected one of the I/O back ends {names}, got {io!r}")
  return name


def layer_loads(io: str, page_layout: layout.PageLayout, on_gpu: bool) -> str:
  """The back end that loads layer by layer: `auto` is the faster one beside compute, by size.

  Measured on an H200: while serving, copies of fragments of 128 KiB run at 37 to 48 GB/s beside
  compute, the kernel at 29; of smaller ones the driver makes less.
  """
  if io != "auto" or not on_gpu:
    return io
  large = page_layout.fragment_bytes >= DRIVER_FRAGMENT_BYTES
  return "copy_engine" if large else "kernel"


def loads_aside(io: str, page_layout: layout.PageLayout, on_gpu: bool) -> str | None:
  """How parked loads are copied beside the compute: `STAGED`, or a name in `BACKENDS` of fragments.

  None: by a program, in turn with the compute.
  """
  if not on_gpu:
    return None
  if io == "auto":  # one copy a page: of smaller ones the driver makes less than the kernel
    return STAGED if page_layout.page_bytes >= DRIVER_PAGE_BYTES else None
  return io if io in fragment_copies.BACKENDS else None


def backups_aside(store_io: str, page_layout: layout.PageLayout, on_gpu: bool) -> str | None:
  """How backups are copied beside the compute, a name in `fragment_copies.BACKENDS`.

  None: they take their turn with the compute, since there is no CUDA driver, the back end is no way
  of the driver's, or fragments are too small for `auto` to choose one.
  """
  if not on_gpu:
    return None
  if store_io in fragment_copies.BACKENDS:
    return store_io
  large = page_layout.fragment_bytes >= side_copies.SMALLEST_FRAGMENT_BYTES
  return "copy_engine" if store_io == "auto" and large else None
