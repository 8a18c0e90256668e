"""Metrics of text workers."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from gateway.metrics.base import Metrics


class TextMetrics(Metrics):
    """Time that requests wait for text workers and take in them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._text_wait = self._histogram("text_wait_seconds", "Time that a request waits for a text worker.")
        self._text_seconds = self._histogram("text_seconds", "Time that a text worker spends on one request.")
        self._text_ends = self._counter("text_workers_ended", "Text workers that were killed or ended by themselves.", "reason")

    def waited(self, seconds: float) -> None:
        """Record how long a request waited for a text worker."""
        self._text_wait.observe(seconds)

    def read(self, seconds: float) -> None:
        """Record how long a text worker read a request."""
        self._text_seconds.observe(seconds)

    def worker_ended(self, reason: str) -> None:
        """Count a lost text worker: ``slow``, ``moved`` to the workers for bulk jobs, ``template``, ``memory``, ``left`` by its
        client, or ``crash``."""
        self._text_ends.labels(reason).inc()

    def watch_queue(self, read: Callable[[], int]) -> None:
        """Report the number of requests that wait for a text worker whenever the metrics are read."""
        queue = self._gauge("text_queue", "Requests that wait for a text worker.")
        queue.set_function(read)
