"""Limits of API keys: rates and concurrency, counted in this process or in Redis."""
