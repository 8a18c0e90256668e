"""Metrics of catalogues."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from gateway.metrics.base import Metrics
from gateway.metrics.model_labels import ModelLabels


class CatalogueMetrics(Metrics):
    """Sizes of catalogues, and operations on their items."""

    def __init__(self, registry: CollectorRegistry, label: ModelLabels) -> None:
        super().__init__(registry)
        self._label = label
        self._catalogues = {
            name: self._gauge(name, f"{text} in the store of catalogues.")
            for name, text in (("catalogues", "Catalogues"), ("catalogue_items", "Registered items"), ("catalogue_bytes", "Bytes"))
        }
        self._catalogue_lookups = self._counter(
            "catalogue_lookups", "Registered items looked up, by source: memory of the gateway, or Redis.", "source"
        )
        self._registered = self._counter("registered_items", "Items registered: added, changed or unchanged.", "result")
        self._warmed = self._counter("warmed_items", "Registered items warmed, by what engines did: cached or computed.", "result")
        self._item_tokens = self._counter(
            "item_first_tokens",
            "Tokens of prompts whose item comes first: saved by a cache of results or a prefix cache, or computed.",
            "model",
            "result",
        )

    def totals(self, catalogues: int, items: int, size: int) -> None:
        """Report the contents of the store of catalogues."""
        for gauge, value in zip(self._catalogues.values(), (catalogues, items, size), strict=True):
            gauge.set(value)

    def watch(self, *reads: Callable[[], int]) -> None:
        """Report the numbers of catalogues, of items and of bytes that the functions return whenever the metrics are read."""
        for gauge, read in zip(self._catalogues.values(), reads, strict=True):
            gauge.set_function(read)

    def items_found(self, memory: int, redis: int) -> None:
        """Count registered items that were looked up."""
        self._catalogue_lookups.labels("memory").inc(memory)
        if redis:
            self._catalogue_lookups.labels("redis").inc(redis)

    def items_registered(self, added: int, changed: int, unchanged: int) -> None:
        """Count registered items."""
        for result, count in (("added", added), ("changed", changed), ("unchanged", unchanged)):
            self._registered.labels(result).inc(count)

    def items_warmed(self, cached: int, computed: int) -> None:
        """Count warmed items."""
        self._warmed.labels("cached").inc(cached)
        self._warmed.labels("computed").inc(computed)

    def scored(self, model: str | None, tokens: int, saved: int) -> None:
        """Count the ``tokens`` of prompts whose item comes first, and how many of them were ``saved``."""
        label = self._label(model)
        self._item_tokens.labels(label, "saved").inc(saved)
        self._item_tokens.labels(label, "computed").inc(max(0, tokens - saved))
