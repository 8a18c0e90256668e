"""Benchmarks of the engine: each compares with a peer in the same run and ends with one line of JSON."""
