"""Benchmarks of engine, kernels and gateway: ``python -m benchmarks``. They are in the source checkout only."""
