"""Kernels: a folder an op, each with the same files (api, reference, mosaic_gpu, arg_specs, bench)."""
