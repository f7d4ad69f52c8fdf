"""Makes an I/O back end by name."""

import jax

from strata_jax.tiers import io_backend, io_reference, layout

GPU_ONLY = ("kernel", "copy_engine", "memcpy_async", "device_put", "auto")
NAMES = ("reference", *GPU_ONLY)


def make_io_backend(name: str, page_layout: layout.PageLayout) -> io_backend.IoBackend:
  """Makes the back end `name` for pools of `page_layout` on JAX's default device.

  Raises:
    ValueError: an unknown name, a back end that needs a GPU on a CPU, or `reference` on a GPU.
  """
  if name not in NAMES:
    raise ValueError(f"I/O back end: expected one of {', '.join(NAMES)}, got {name!r}")
  platform = jax.default_backend()
  if name == "reference":
    if platform == "gpu":
      raise ValueError(
        "I/O back end 'reference' is for the CPU: on a GPU it would copy the whole host pool"
      )
    return io_reference.ReferenceIo(page_layout)
  raise ValueError(f"I/O back end {name!r}: expected a GPU, got the platform {platform!r}")
