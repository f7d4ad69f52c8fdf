"""The parts of the cache controller; `strata_jax.cache_controller` is the way in."""
