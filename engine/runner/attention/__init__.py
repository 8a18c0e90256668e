"""Attention over slots, and its backends."""
