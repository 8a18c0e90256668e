"""Checks of settings, and where they come from."""
