"""Metrics of LoRA adapters."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from gateway.metrics.base import Metrics

MOST_ADAPTER_LABELS = 256
"""Most adapters with a series of their own."""
OTHER_ADAPTERS = ":other"
"""Stands for all others; no adapter can have this name."""


class AdapterMetrics(Metrics):
    """Use and management of adapters."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._adapter_requests = self._counter("adapter_requests", "Requests answered with an adapter.", "model", "adapter")
        self._adapter_labels: set[tuple[str, str]] = set()
        self._adapter_operations = self._counter(
            "adapter_operations", "Loads, restorations and unloads of adapters on engines, by result.", "operation", "result"
        )

    def answered(self, model: str, adapter: str) -> None:
        """Count a finished request for ``adapter``, a name from an engine's list. Beyond :data:`MOST_ADAPTER_LABELS`, new names are
        counted together, because operators may load any number one after another."""
        labels = (model, adapter)
        if labels not in self._adapter_labels and len(self._adapter_labels) >= MOST_ADAPTER_LABELS:
            labels = (model, OTHER_ADAPTERS)
        self._adapter_labels.add(labels)
        self._adapter_requests.labels(*labels).inc()

    def operated(self, operation: str, done: int, failed: int) -> None:
        """Count the engines on which an adapter was loaded (``load``), loaded again (``restore``) or unloaded (``unload``)."""
        for result, count in (("done", done), ("failed", failed)):
            if count:
                self._adapter_operations.labels(operation, result).inc(count)
