"""strata_jax: tiered KV caches and scheduling for long-context LLM serving, in JAX.

Nothing is imported here: each part is imported by its own path, so that the tree or the scheduler
can be used without JAX.
"""
