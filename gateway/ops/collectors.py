"""Metrics that are read from other parts of the gateway when Prometheus asks for them, for :meth:`Telemetry.watch`."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


class ReplicaSample(NamedTuple):
    """State of a replica for the metrics."""

    url: str
    model: str
    """Empty while the model is unknown."""
    state: str
    in_flight: int
    tokens: int


class ModelSample(NamedTuple):
    """State of a model for the metrics, all its versions together."""

    name: str
    ready: int
    """Replicas that take requests."""
    waiting: int
    """Requests that wait for one."""
    adapters: int = 0
    """Adapters that some replica has."""


class KeySample(NamedTuple):
    """State of the key file."""

    keys: int
    """Number of valid entries, including expired ones."""
    age: float
    """Seconds since a check confirmed that the keys are those of the file."""
    stale: bool
    """Whether the file cannot be read or is not valid."""
    problems: int
    """Number of problems of entries that do not count."""


class ItemCacheSample(NamedTuple):
    """Counters of the items in the prefix cache of one engine, as it tells them."""

    url: str
    tokens: int
    bytes: int
    scored_items: int
    found_items: int
    evicted_tokens: int


def dropped_lines(dropped: int) -> Iterator[Metric]:
    """Yield the number of log lines ``dropped`` so far."""
    help = "Log lines that were dropped because the log's reader is too slow or the disk is full."
    yield CounterMetricFamily("yardstick_log_lines_dropped", help, value=dropped)


def dropped_spans(dropped: int) -> Iterator[Metric]:
    """Yield the number of spans ``dropped`` so far."""
    help = "Spans that were dropped because the collector of traces is away, too slow, or refused them."
    yield CounterMetricFamily("yardstick_spans_dropped", help, value=dropped)


def key_file(sample: KeySample) -> Iterator[Metric]:
    """Yield the state of the key file."""
    yield GaugeMetricFamily("yardstick_api_keys", "API keys in use.", value=sample.keys)
    age_help = "Time since the last check that the keys in use are those of the key file."
    yield GaugeMetricFamily("yardstick_key_file_age_seconds", age_help, value=sample.age)
    stale_help = "Whether the key file cannot be read or is not valid, and keys of an earlier version are used."
    yield GaugeMetricFamily("yardstick_key_file_stale", stale_help, value=float(sample.stale))
    problems_help = "Problems of entries of the key file, which do not count; its other entries do."
    yield GaugeMetricFamily("yardstick_key_file_problems", problems_help, value=sample.problems)


def fleet(replicas: Iterable[ReplicaSample], models: Iterable[ModelSample], found: Callable[[str], None]) -> Iterator[Metric]:
    """Yield metrics of all replicas and known models; a removed replica has no series, a model without replicas has. ``found`` is
    called with the name of each model."""
    samples = list(replicas)
    ready = sum(sample.state in ("ready", "half_open", "ejected") for sample in samples)
    yield GaugeMetricFamily("yardstick_engines_ready", "Engines that take requests.", value=ready)
    by_model = GaugeMetricFamily("yardstick_model_engines_ready", "Engines of a model that take requests.", labels=["model"])
    waiting = GaugeMetricFamily(
        "yardstick_model_requests_waiting", "Requests that wait for an engine of a model to be ready.", labels=["model"]
    )
    adapters = GaugeMetricFamily("yardstick_adapters", "Adapters of a model that an engine has.", labels=["model"])
    for known in models:
        found(known.name)
        by_model.add_metric([known.name], known.ready)
        waiting.add_metric([known.name], known.waiting)
        adapters.add_metric([known.name], known.adapters)
    yield from (by_model, waiting, adapters)
    states = GaugeMetricFamily("yardstick_engines", "Engines by state.", labels=["model", "state"])
    for (model, state), count in Tally((sample.model, sample.state) for sample in samples).items():
        states.add_metric([model, state], count)
    yield states
    labels = ["engine", "model"]
    in_flight = GaugeMetricFamily("yardstick_engine_requests_in_flight", "Requests in progress on an engine.", labels=labels)
    tokens = GaugeMetricFamily(
        "yardstick_engine_tokens_in_flight", "Tokens of the requests in progress on an engine.", labels=labels
    )
    for sample in samples:
        in_flight.add_metric([sample.url, sample.model], sample.in_flight)
        tokens.add_metric([sample.url, sample.model], sample.tokens)
    yield from (in_flight, tokens)


_ITEM_GAUGES = {
    "tokens": "Tokens of items in the prefix cache of an engine.",
    "bytes": "Bytes of keys and values of items in the prefix cache of an engine.",
}
_ITEM_COUNTERS = {
    "scored_items": "Items that an engine scored and that came before the query.",
    "found_items": "Of these, items that were in its prefix cache whole.",
    "evicted_tokens": "Tokens of items evicted from the prefix cache of an engine.",
}


def item_caches(samples: Iterable[ItemCacheSample]) -> Iterator[Metric]:
    """Yield one series for each engine that has reported its items. Every gateway reports the same."""
    rows = [sample._asdict() for sample in samples]
    for kind, texts in ((GaugeMetricFamily, _ITEM_GAUGES), (CounterMetricFamily, _ITEM_COUNTERS)):
        for name, text in texts.items():
            family = kind(f"yardstick_item_cache_{name}", text, labels=["engine"])
            for row in rows:
                family.add_metric([row["url"]], row[name])
            yield family
