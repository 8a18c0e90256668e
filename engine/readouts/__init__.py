"""Readouts."""
