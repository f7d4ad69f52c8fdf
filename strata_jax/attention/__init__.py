"""Attention over KV pages, behind `implementation=`."""

from strata_jax.attention.api import (
  IMPLEMENTATIONS,
  UNWRITTEN,
  Plan,
  paged_attention,
  plan_reads,
  unwritten_attention,
  write_kv,
)

__all__ = [
  "IMPLEMENTATIONS",
  "UNWRITTEN",
  "Plan",
  "paged_attention",
  "plan_reads",
  "unwritten_attention",
  "write_kv",
]
