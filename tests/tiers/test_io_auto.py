import jax
import pytest

from strata_jax.tiers import io_auto, io_reference, layout

LAYOUT = layout.PageLayout(num_layers=1, page_size=1, kv_heads=1, head_dim=16)


def test_an_unknown_name_lists_the_known_ones():
  with pytest.raises(ValueError, match=r"expected one of reference, kernel, .*got 'gpu'"):
    io_auto.make_io_backend("gpu", LAYOUT)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks for GPU back ends on a CPU")
@pytest.mark.parametrize("name", io_auto.GPU_ONLY)
def test_gpu_back_ends_are_refused_on_a_cpu(name):
  with pytest.raises(ValueError, match=f"{name}.*expected a GPU, got the platform 'cpu'"):
    io_auto.make_io_backend(name, LAYOUT)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the reference back end is for CPUs")
@pytest.mark.parametrize("name", ["reference", "auto"])
def test_reference_is_what_a_cpu_has(name):
  backend = io_auto.make_io_backend(name, LAYOUT)
  assert isinstance(backend, io_reference.ReferenceIo)
  assert backend.name == "reference"
