"""Shapes and sizes of KV pages in every tier."""

import dataclasses

from strata_jax import validation

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageLayout:
  """One model's KV page: `page_size` tokens of all layers.

  A fragment is one page in one layer, K and V side by side: `[2, page_size, kv_heads, head_dim]`.
  """

  num_layers: int  # layers of the model
  page_size: int  # tokens of a page
  kv_heads: int  # heads of K, and of V, in a layer
  head_dim: int  # elements of a head
  dtype: str = "float32"  # of K and V

  def __post_init__(self) -> None:
    for field in ("num_layers", "page_size", "kv_heads", "head_dim"):
      validation.check_int(self, field, minimum=1)
    validation.check_choice(self, "dtype", tuple(_ITEMSIZE))

  @property
  def itemsize_bytes(self) -> int:
    return _ITEMSIZE[self.dtype]

  @property
  def fragment_bytes(self) -> int:
    return 2 * self.page_size * self.kv_heads * self.head_dim * self.itemsize_bytes

  @property
  def page_bytes(self) -> int:
    return self.num_layers * self.fragment_bytes

  @property
  def token_bytes(self) -> int:
    return self.page_bytes // self.page_size

  @property
  def fragment_shape(self) -> tuple[int, ...]:
    """`[2, page_size, kv_heads, head_dim]`."""
    return (2, self.page_size, self.kv_heads, self.head_dim)

  def device_shape(self, pages: int) -> tuple[int, ...]:
    """Layer-first, one array a layer: `[pages, 2, page_size, kv_heads, head_dim]`."""
    return (pages, *self.fragment_shape)

  def host_shape(self, pages: int) -> tuple[int, ...]:
    """Page-first, one array in all: `[pages, layers, 2, page_size, kv_heads, head_dim]`."""
    return (pages, self.num_layers, *self.fragment_shape)
