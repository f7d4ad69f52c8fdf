"""The loop in C, with the CPU in the place of the driver."""

import ctypes

import jax
import numpy as np
import pytest

from experiments import flags, submit_loop
from strata_jax.tiers import cuda_copies


def copies(source, target, order, part_bytes):
  return cuda_copies.Copies(
    targets=cuda_copies.addresses(target.ctypes.data, np.arange(len(order)), part_bytes),
    sources=cuda_copies.addresses(source.ctypes.data, order, part_bytes),
    size_bytes=part_bytes,
  )


def test_the_loop_in_c_copies_every_part(monkeypatch):
  made = []
  call_type = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
  )

  @call_type
  def call(target, source, size, kind, stream):
    made.append((kind, stream))
    ctypes.memmove(target, source, size)
    return 0 if len(made) < 7 else 700

  monkeypatch.setattr(cuda_copies, "memcpy_async", lambda: call)
  submit = submit_loop.c_loop()
  source = np.arange(50, dtype=np.uint8)
  target = np.zeros_like(source)
  order = np.array([3, 1, 4, 0, 2])
  submit(copies(source, target, order, 10), 77)
  np.testing.assert_array_equal(target.reshape(5, 10), source.reshape(5, 10)[order])
  assert made == [(4, 77)] * 5
  with pytest.raises(RuntimeError, match="cudaMemcpyAsync: CUDA error 700"):
    submit(copies(source, target, order, 10), 77)
  assert len(made) == 7  # it stops there


def test_what_is_missing_is_said(monkeypatch):
  monkeypatch.setattr(submit_loop.shutil, "which", lambda name: None)
  with pytest.raises(flags.UsageError, match="expected a C compiler"):
    submit_loop.c_loop()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="about a CPU")
def test_a_gpu_is_needed():
  with pytest.raises(flags.UsageError, match="expected a GPU"):
    submit_loop.main(submit_loop.FLAGS.parse([]))
