"""Formats of weights, keys and values."""
