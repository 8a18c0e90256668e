"""Benchmarks of the gateway: CPU time of its process, in front of a fake engine."""
