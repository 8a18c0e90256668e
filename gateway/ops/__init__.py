"""Metrics, access log and traces."""
