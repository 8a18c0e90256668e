"""Slots for keys and values, and the prefix cache that shares them between requests."""
