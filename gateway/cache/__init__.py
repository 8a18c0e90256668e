"""Caches of scores, and sharing of scores that are being computed."""
