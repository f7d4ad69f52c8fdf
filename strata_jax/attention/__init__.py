"""Attention over KV pages, behind `implementation=`."""

from strata_jax.attention.api import (
  IMPLEMENTATIONS,
  UNWRITTEN,
  paged_attention,
  unwritten_attention,
  write_kv,
)

__all__ = [
  "IMPLEMENTATIONS",
  "UNWRITTEN",
  "paged_attention",
  "unwritten_attention",
  "write_kv",
]
