"""Calls of functions with kernels that are lowered once for all programs which have them.

Lowering a Mosaic kernel takes half a second, in every program and again for every place in it.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax
from jax import export

_KERNEL = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")  # nothing is kept in a file
_LOWERING = threading.RLock()  # of one thread at a time: it changes a setting of the process


def call(function: Callable[..., Any], *args: Any) -> Any:
  """`function(*args)` for a GPU, traced and lowered at the first call for these shapes.

  Args:
    function: of trees of arrays; one that lives as long as the process.
    args: the trees; what is static in them is a part of their structure. A call may not stand in
      a region with a stream of its own.
  """
  leaves, tree = jax.tree.flatten(args)
  shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in leaves)
  with _LOWERING:
    exported = _exported(function, shapes, tree)
  return exported.call(*args)


@functools.cache
def _exported(
  function: Callable[..., Any],
  shapes: tuple[tuple[tuple[int, ...], str], ...],
  tree: jax.tree_util.PyTreeDef,
) -> export.Exported:
  """`shapes` and dtypes are of the leaves of all its arrays."""
  arguments = tree.unflatten([jax.ShapeDtypeStruct(*shape) for shape in shapes])
  with _newest_form():
    return export.export(jax.jit(function), platforms=["cuda"], disabled_checks=[_KERNEL])(
      *arguments
    )


@contextlib.contextmanager
def _newest_form() -> Generator[None]:
  """Kernels are exported as they are lowered elsewhere, not in a form for older releases too."""
  name = "jax_export_ignore_forward_compatibility"
  before = getattr(jax.config, name)
  jax.config.update(name, True)
  try:
    yield
  finally:
    jax.config.update(name, before)
