"""Benchmarks of the kernels beside the limits of the GPU they run on: ``python -m benchmarks kernels``."""
