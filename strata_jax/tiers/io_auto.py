"""Makes an I/O back end by name."""

import jax

from strata_jax.tiers import (
  io_backend,
  io_choice,
  io_copy_engine,
  io_device_put,
  io_kernel,
  io_memcpy_async,
  io_reference,
  layout,
)

_MAKERS = {
  "reference": io_reference.ReferenceIo,
  "kernel": io_kernel.KernelIo,
  "copy_engine": io_copy_engine.CopyEngineIo,
  "memcpy_async": io_memcpy_async.MemcpyAsyncIo,
  "device_put": io_device_put.DevicePutIo,
}
GPU_ONLY = ("kernel", "copy_engine", "memcpy_async")
NAMES = (*_MAKERS, "auto")


def make_io_backend(name: str, page_layout: layout.PageLayout) -> io_backend.IoBackend:
  """Makes the back end `name` for pools of `page_layout` on JAX's default device.

  `auto` is the reference on a CPU, and on a GPU for every direction and size of a call what was
  fastest when the table in `io_choice` was measured.

  Raises:
    ValueError: an unknown name, a back end that needs a GPU on a CPU, or `reference` on a GPU.
  """
  if name not in NAMES:
    raise ValueError(f"I/O back end: expected one of {', '.join(NAMES)}, got {name!r}")
  platform = jax.default_backend()
  if name == "auto":
    if platform != "gpu":
      return io_reference.ReferenceIo(page_layout)
    return io_choice.ChosenIo(
      page_layout,
      {key: make_io_backend(key, page_layout) for key in io_choice.CANDIDATES},
      io_choice.read_table(),
    )
  if name in GPU_ONLY and platform != "gpu":
    raise ValueError(f"I/O back end {name!r}: expected a GPU, got the platform {platform!r}")
  if name == "reference" and platform == "gpu":
    raise ValueError(
      "I/O back end 'reference' is for the CPU: on a GPU it would copy the whole host pool"
    )
  return _MAKERS[name](page_layout)
