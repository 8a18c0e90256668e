"""Metrics of the items in the prefix caches of engines, as engines tell them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class ItemCacheSample(NamedTuple):
    """Counters of the items in one engine."""

    url: str
    tokens: int
    bytes: int
    pinned_tokens: int
    scored_items: int
    found_items: int
    evicted_tokens: int


_GAUGES = {
    "tokens": "Tokens of items in the prefix cache of an engine.",
    "bytes": "Bytes of keys and values of items in the prefix cache of an engine.",
    "pinned_tokens": "Tokens of pinned items in the prefix cache of an engine.",
}
_COUNTERS = {
    "scored_items": "Items that an engine scored and that came before the query.",
    "found_items": "Of these, items that were in its prefix cache whole.",
    "evicted_tokens": "Tokens of items evicted from the prefix cache of an engine.",
}


class ItemCachesCollector(Collector):
    """One series for each engine that has reported its items. Every gateway reports the same."""

    def __init__(self, read: Callable[[], Iterable[ItemCacheSample]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        samples = [sample._asdict() for sample in self._read()]
        for kind, texts in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text in texts.items():
                family = kind(f"yardstick_item_cache_{name}", text, labels=["engine"])
                for sample in samples:
                    family.add_metric([sample["url"]], sample[name])
                yield family
