"""Converts pages between a page-first staging buffer and layer-first pools inside device memory."""
