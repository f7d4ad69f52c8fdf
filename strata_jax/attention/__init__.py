"""Attention over KV pages, behind `implementation=`."""

from strata_jax.attention.api import IMPLEMENTATIONS, paged_attention, write_kv

__all__ = ["IMPLEMENTATIONS", "paged_attention", "write_kv"]
