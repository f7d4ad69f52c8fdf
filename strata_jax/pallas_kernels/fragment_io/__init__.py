"""Moves KV fragments between the page-first host pool and the layer-first device pool."""
