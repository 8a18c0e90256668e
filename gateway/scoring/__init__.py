"""Scoring: cache lookup, splitting into sub-batches, merging in request order."""
