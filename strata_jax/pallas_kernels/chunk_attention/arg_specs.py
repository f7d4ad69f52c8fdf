"""Batches of chunks of real models, for tests and benches."""

import dataclasses

from strata_jax.pallas_kernels.decode_attention import arg_specs as decode_specs

CHUNK = 64  # padded tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkArgs:
  """Shapes of one layer's chunk attention on one device."""

  batch: int
  chunk: int
  heads: int
  kv_heads: int
  head_dim: int
  page_size: int

  def q_shape(self) -> tuple[int, int, int, int]:
    return self.batch, self.chunk, self.heads, self.head_dim

  def pool_shape(self, pages: int) -> tuple[int, int, int, int, int]:
    return pages, 2, self.page_size, self.kv_heads, self.head_dim


def _args() -> dict[str, ChunkArgs]:
  """The models and pages of decode, in batches of 1 and 4."""
  return {
    f"{name.rsplit('-', 1)[0]}-batch{batch}": ChunkArgs(
      batch=batch,
      chunk=CHUNK,
      heads=spec.heads,
      kv_heads=spec.kv_heads,
      head_dim=spec.head_dim,
      page_size=spec.page_size,
    )
    for name, spec in decode_specs.ARG_SPECS.items()
    for batch in (1, 4)
  }


ARG_SPECS = _args()
