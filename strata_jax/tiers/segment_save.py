"""One segment, committed by Orbax."""

import errno
import os

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from strata_jax.tiers.segment_index import PAGES_FILE


class _RawArrays(ocp.PyTreeCheckpointHandler):
  """Orbax's handler of trees, for raw arrays: there are no OCDBT files to merge at the end."""

  def finalize(self, directory) -> None:
    pass


@ocp.args.register_with_handler(_RawArrays, for_save=True)
class _Save(ocp.args.PyTreeSave):
  pass


@ocp.args.register_with_handler(_RawArrays, for_restore=True)
class _Restore(ocp.args.PyTreeRestore):
  pass


class SegmentSaver:
  """Writes segments; one thread at a time."""

  def __init__(self) -> None:
    # Pages are not copied once more: their owner waits until they are saved.
    numpy_handler = type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    registry = type_handlers.create_type_handler_registry(
      (jax.Array, type_handlers.ArrayHandler()), (np.ndarray, numpy_handler)
    )
    self._checkpointer = ocp.Checkpointer(
      _RawArrays(use_ocdbt=False, use_compression=False, type_handler_registry=registry)
    )

  def save(self, path: str, pages: np.ndarray, index: np.ndarray, metadata: dict) -> None:
    """Commits pages, uint8 [pages, page_bytes], and their index under `path`, which is new.

    Raises:
      OSError: the medium refused. What was written so far is left behind.
    """
    try:
      tree = {"pages": pages, "index": index}
      self._checkpointer.save(path, args=_Save(tree, custom_metadata=metadata))
    except OSError:
      raise
    except Exception as error:  # TensorStore reports faults of the medium as ValueError
      full = "RESOURCE_EXHAUSTED" in str(error) or "No space" in str(error)
      raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
    try:
      size = os.stat(os.path.join(path, PAGES_FILE)).st_size
    except FileNotFoundError:  # whole, and merged or evicted by another process already
      return
    if size != pages.nbytes:
      raise OSError(errno.EIO, f"{path}: expected one raw file of {pages.nbytes} bytes, got {size}")

  def close(self) -> None:
    self._checkpointer.close()
