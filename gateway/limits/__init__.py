"""Limits of API keys, and admission: the bounds on all work that the gateway accepts."""
