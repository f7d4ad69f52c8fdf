"""Stands in for the CUDA driver on a CPU, whose pools have addresses, too."""

import ctypes

import pytest

from strata_jax.tiers import cuda_copies


def copy(copies: cuda_copies.Copies, stream: int) -> None:
  """Carries the copies out at once."""
  del stream
  for target, source in zip(copies.targets.tolist(), copies.sources.tolist(), strict=True):
    ctypes.memmove(target, source, copies.size_bytes)


class SideStream:
  """A stream that is always done."""

  stream = 0

  def wait_for(self, stream: int) -> None:
    del stream

  def gate(self, stream: int) -> None:
    del stream

  def synchronize(self) -> None:
    pass


def install(monkeypatch: pytest.MonkeyPatch) -> None:
  """Puts the stand-ins in the place of the driver."""
  monkeypatch.setattr(cuda_copies, "submit_each", copy)
  monkeypatch.setattr(cuda_copies, "submit_batch", copy)
  monkeypatch.setattr(cuda_copies, "SideStream", SideStream)
  monkeypatch.setattr(cuda_copies, "stream_of", lambda context: 0)
