"""Costs of a request, for the access log and the metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Account:
    """Costs of a request, for the access log. Routes fill in the fields as they become known."""

    model: str | None = None
    adapter: str | None = None
    """Adapter of the model, as engines call it; None without one."""
    items: int = 0
    cache_hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    """Longest time that a part of the request waited in an engine's queue."""
