"""Kernels, a folder an op: api, reference, mosaic_gpu, arg_specs, bench."""
