"""The policy core: pure functions from frozen views to frozen plans.

Standard library only: no JAX, no clock, no randomness, no I/O, no flags.
"""
