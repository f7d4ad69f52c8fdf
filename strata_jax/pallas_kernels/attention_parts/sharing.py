"""Which rows read their common tokens once: what kernel and simulation must agree on. No JAX."""

LEAST_SHARED_TOKENS = 256  # with fewer a group saves less than its parts cost
LEAST_SHARED_PART = 4  # rows are alike that share at least the longest context divided by this
