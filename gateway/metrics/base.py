"""The registry of a gateway's metrics, and how metrics are made in it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper bounds of the histograms' buckets."""


class Metrics:
    """Makes metrics in one registry; their names begin with ``yardstick_``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"yardstick_{name}", help, labels, registry=self._registry)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"yardstick_{name}", help, registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...] = SECONDS, labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(f"yardstick_{name}", help, labels, buckets=buckets, registry=self._registry)
