"""Metrics of catalogues."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
        self._registered = self._counter("registered_items", "Items registered: added, changed or unchanged.", "result")
        self._item_tokens = self._counter(
            "item_first_tokens",
            "Tokens of prompts whose item comes first: saved by a cache of results or a prefix cache, or computed.",
            "model",
            "result",
        )

    def watch(self, totals: Callable[[], tuple[int, int, int]]) -> None:
        """Report the numbers of catalogues, of items and of bytes that ``totals`` returns whenever the metrics are read."""
        for place, gauge in enumerate(self._catalogues.values()):
            gauge.set_function(partial(_number, totals, place))

    def items_registered(self, added: int, changed: int, unchanged: int) -> None:
        """Count registered items."""
        for result, count in (("added", added), ("changed", changed), ("unchanged", unchanged)):
            self._registered.labels(result).inc(count)

    def scored(self, model: str | None, tokens: int, saved: int) -> None:
        """Count the ``tokens`` of prompts whose item comes first, and how many of them were ``saved``."""
        label = self._label(model)
        self._item_tokens.labels(label, "saved").inc(saved)
        self._item_tokens.labels(label, "computed").inc(max(0, tokens - saved))


def _number(totals: Callable[[], tuple[int, int, int]], place: int) -> int:
    return totals()[place]
