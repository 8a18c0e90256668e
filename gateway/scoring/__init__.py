"""Scoring: cache lookup, sub-batches, ordered merge."""
