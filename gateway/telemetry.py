"""Every metric of the gateway, in one place."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper bounds of the histograms' buckets."""


SUB_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class ReplicaSample(NamedTuple):
    """What is told of a replica."""

    url: str
    model: str
    """Empty while it is not known."""
    state: str
    in_flight: int
    tokens: int


class Telemetry:
    """The metrics of one application, in a registry of its own. Labels take few values: no text from clients is among them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.in_flight = Gauge("yardstick_requests_in_flight", "Requests being worked on.", registry=self._registry)
        self.waiting = Gauge("yardstick_requests_waiting", "Requests that wait for an engine to be ready.", registry=self._registry)
        self.ejections = self._counter("engine_ejections", "Engines left alone for a while, because they kept failing.")
        self.resumptions = self._counter("resumed_sequences", "Generated sequences that went on at another engine.")
        self._retries = self._counter("engine_retries", "Requests sent to another engine, by the failure of the first.", "code")
        self._sub_batches = Histogram(
            "yardstick_sub_batches", "Messages to engines for one score request.", buckets=SUB_BATCHES, registry=self._registry
        )
        self._requests = self._counter("requests", "Requests answered.", "route", "status")
        self._seconds = self._histogram("request_seconds", "From a request to the end of its answer.")
        self._first_seconds = self._histogram("first_byte_seconds", "From a request to the start of its answer.")
        self._tokens = self._counter("tokens", "Tokens of answers.", "model", "kind")
        self._items = self._counter("items", "Items scored, by the source of the result.", "model", "source")
        self._engine_errors = self._counter("engine_errors", "Calls of engines that failed.", "code")

    def answered(self, route: str, status: int, first_seconds: float, seconds: float) -> None:
        """A request to ``route`` (a template, not a path) is over."""
        self._requests.labels(route, status).inc()
        self._first_seconds.labels(route).observe(first_seconds)
        self._seconds.labels(route).observe(seconds)

    def scored(self, model: str, items: int, hits: int, prompt_tokens: int, cached_tokens: int) -> None:
        """A score request was answered."""
        self._items.labels(model, "cache").inc(hits)
        self._items.labels(model, "engine").inc(items - hits)
        self._count(model, prompt_tokens, cached_tokens)

    def generated(self, model: str, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """A generation was answered, or given up."""
        self._count(model, prompt_tokens, cached_tokens)
        self._tokens.labels(model, "completion").inc(completion_tokens)

    def engine_failed(self, code: str) -> None:
        """An engine refused a call, or was lost during it."""
        self._engine_errors.labels(code).inc()

    def retried(self, code: str) -> None:
        """A request is about to be sent to another engine."""
        self._retries.labels(code).inc()

    def split(self, parts: int) -> None:
        """A score request is about to be sent in so many parts."""
        self._sub_batches.observe(parts)

    def watch_replicas(self, read: Callable[[], Iterable[ReplicaSample]]) -> None:
        """Tell of the replicas that ``read`` gives whenever the metrics are read; of one that is gone nothing stays."""
        self._registry.register(_Replicas(read))

    def exposition(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def _count(self, model: str, prompt_tokens: int, cached_tokens: int) -> None:
        self._tokens.labels(model, "prompt").inc(prompt_tokens)
        self._tokens.labels(model, "prompt_cached").inc(cached_tokens)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"yardstick_{name}", help, labels, registry=self._registry)

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(f"yardstick_{name}", help, ["route"], buckets=SECONDS, registry=self._registry)


class _Replicas(Collector):
    def __init__(self, read: Callable[[], Iterable[ReplicaSample]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        samples = list(self._read())
        ready = sum(sample.state in ("ready", "half_open", "ejected") for sample in samples)
        yield GaugeMetricFamily("yardstick_engines_ready", "Engines that take requests.", value=ready)
        states = GaugeMetricFamily("yardstick_engines", "Engines by what they are doing.", labels=["model", "state"])
        for (model, state), count in Tally((sample.model, sample.state) for sample in samples).items():
            states.add_metric([model, state], count)
        yield states
        in_flight = GaugeMetricFamily("yardstick_engine_requests_in_flight", "Requests at an engine.", labels=["engine"])
        tokens = GaugeMetricFamily("yardstick_engine_tokens_in_flight", "Tokens of those requests.", labels=["engine"])
        for sample in samples:
            in_flight.add_metric([sample.url], sample.in_flight)
            tokens.add_metric([sample.url], sample.tokens)
        yield from (in_flight, tokens)
