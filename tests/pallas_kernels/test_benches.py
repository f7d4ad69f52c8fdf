"""The benches of both ops run, here with the reference."""

from strata_jax.pallas_kernels.fragment_io import bench as fragment_bench
from strata_jax.pallas_kernels.layout_convert import bench as layout_bench
from strata_jax.tiers import layout

LAYOUT = layout.PageLayout(num_layers=2, page_size=1, kv_heads=1, head_dim=64)


def test_fragment_rates():
  rates = fragment_bench.measure(LAYOUT, host_pages=20, pages=10, implementation="reference")
  assert set(rates) == {"load", "store"}
  assert all(gbps > 0 for gbps in rates.values())


def test_conversion_rates():
  rates = layout_bench.measure(LAYOUT, pages=10, implementation="reference")
  assert set(rates) == {"pages_to_layers", "layers_to_pages"}
  assert all(gbps > 0 for gbps in rates.values())
  assert layout_bench.device_copy_gbps(1 << 20) > 0
