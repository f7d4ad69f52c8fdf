import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.tiers import cuda_copies
from tests.tiers import cpu_driver


def test_addresses_of_parts_beyond_2_to_the_32_bytes():
  got = cuda_copies.addresses(1 << 40, np.array([0, 3, 1 << 20]), 1 << 16)
  assert got.dtype == np.uint64
  assert got.tolist() == [1 << 40, (1 << 40) + 3 * (1 << 16), (1 << 40) + (1 << 36)]


def test_lists_are_cut_at_the_count():
  host, device = cuda_copies.read_lists(jnp.array([5, 6, -9]), jnp.array([1, 2, 99]), jnp.int32(2))
  assert host.tolist() == [5, 6]
  assert device.tolist() == [1, 2]
  assert host.dtype == np.int64


def test_a_program_gets_its_own_plan_and_the_addresses_of_its_arrays(monkeypatch):
  cpu_driver.install(monkeypatch)
  calls = cuda_copies.CopyCalls(cpu_driver.copy)
  program = jax.jit(lambda target, source: calls.insert((target,), (source,))[0], donate_argnums=0)
  target = jax.jit(lambda: jnp.zeros((4, 8), jnp.bfloat16))()
  source = jnp.arange(32, dtype=jnp.bfloat16).reshape(4, 8)
  for here, there in ((1, 3), (2, 0)):

    def plan(written, read, here=here, there=there):
      part = lambda base, row: cuda_copies.addresses(base, np.array([row]), 16)
      return cuda_copies.Copies(
        targets=part(written[0], there), sources=part(read[0], here), size_bytes=16
      )

    calls.hand_over(plan)
    target = program(target, source)
  got = np.array(target.astype(jnp.float32))
  want = np.zeros((4, 8), np.float32)
  want[[3, 0]] = np.array(source.astype(jnp.float32))[[1, 2]]
  np.testing.assert_array_equal(got, want)


def test_without_the_cuda_extra_the_error_says_what_to_install(monkeypatch):
  def missing(name):
    raise ImportError(name)

  monkeypatch.setattr(importlib, "import_module", missing)
  with pytest.raises(ImportError, match=r"cuda.bindings.runtime: pip install 'strata-jax\[cuda\]'"):
    cuda_copies.SideStream()


@pytest.mark.parametrize(
  ("submit", "call", "calls"),
  [
    (cuda_copies.submit_each, "cudaMemcpyAsync", 3),
    (cuda_copies.submit_batch, "cudaMemcpyBatchAsync", 1),
  ],
)
def test_a_copy_that_cuda_refuses_is_an_error(monkeypatch, submit, call, calls):
  seen = []

  class Cudart:
    """A library whose calls all answer 1, cudaErrorInvalidValue."""

    def __getattr__(self, name):
      def answer(*args):
        seen.append((name, args))
        return 1

      return answer

  monkeypatch.setattr(cuda_copies, "_cudart", Cudart)
  places = cuda_copies.addresses(0, np.arange(3), 16)
  copies = cuda_copies.Copies(targets=places, sources=places, size_bytes=16)
  with pytest.raises(RuntimeError, match=f"{call}: CUDA error 1"):
    submit(copies, 0)
  assert [name for name, _ in seen] == [call] * calls


def test_an_empty_batch_is_not_submitted(monkeypatch):
  monkeypatch.setattr(cuda_copies, "_cudart", lambda: pytest.fail("called"))
  nothing = np.zeros(0, np.uint64)
  cuda_copies.submit_batch(
    cuda_copies.Copies(targets=nothing, sources=nothing, size_bytes=16), stream=0
  )
