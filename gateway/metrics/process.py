"""Metrics of the gateway's process: delays of its event loop, and its garbage collections."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from gateway.metrics.base import Metrics


class ProcessMetrics(Metrics):
    """Times at which the event loop served nothing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._blocked = self._histogram(
            "event_loop_blocked_seconds", "Delay of the event loop's due callbacks, if longer than a millisecond."
        )
        self._most_blocked = self._gauge("event_loop_blocked_max_seconds", "Longest of these delays since the start.")
        self._longest_block = 0.0
        self._collections = self._counter(
            "garbage_collections", "Full collections of garbage: while idle, or overdue because requests never paused.", "reason"
        )

    def blocked(self, seconds: float) -> None:
        """Record that the event loop ran for ``seconds`` without serving what was due."""
        self._blocked.observe(seconds)
        if seconds > self._longest_block:
            self._longest_block = seconds
            self._most_blocked.set(seconds)

    def garbage_collected(self, reason: str) -> None:
        """Count a full garbage collection: while ``idle``, or because it was ``overdue``."""
        self._collections.labels(reason).inc()
