"""Executors: what carries a step out. One loop and one controller drive all of them."""
