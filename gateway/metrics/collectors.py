"""Metrics that are read from other parts of the gateway when Prometheus asks for them."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


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


class SingleMetric(Collector):
    """A registry with a single metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


class KeyFileCollector(Collector):
    """Metrics of the key file."""

    def __init__(self, read: Callable[[], KeySample]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        keys, age, stale = self._read()
        yield GaugeMetricFamily("yardstick_api_keys", "API keys in use.", value=keys)
        age_help = "Time since the last check that the keys in use are those of the key file."
        yield GaugeMetricFamily("yardstick_key_file_age_seconds", age_help, value=age)
        stale_help = "Whether the key file cannot be read or is not valid, and keys of an earlier version are used."
        yield GaugeMetricFamily("yardstick_key_file_stale", stale_help, value=float(stale))


class DroppedLinesCollector(Collector):
    """The number of dropped log lines."""

    def __init__(self, dropped: Callable[[], int]) -> None:
        self._dropped = dropped

    def collect(self) -> Iterator[Metric]:
        help = "Log lines that were dropped because the log's reader is too slow or the disk is full."
        yield CounterMetricFamily("yardstick_log_lines_dropped", help, value=self._dropped())


class DroppedSpansCollector(Collector):
    """The number of dropped spans."""

    def __init__(self, dropped: Callable[[], int]) -> None:
        self._dropped = dropped

    def collect(self) -> Iterator[Metric]:
        help = "Spans that were dropped because the collector of traces is away, too slow, or refused them."
        yield CounterMetricFamily("yardstick_spans_dropped", help, value=self._dropped())


class ReplicasCollector(Collector):
    """Metrics of all replicas and known models; a removed replica has no series, a model without replicas has.

    ``found`` is called with the name of each model."""

    def __init__(
        self,
        read: Callable[[], Iterable[ReplicaSample]],
        models: Callable[[], Iterable[ModelSample]],
        found: Callable[[str], None],
    ) -> None:
        self._read, self._models, self._found = read, models, found

    def collect(self) -> Iterator[Metric]:
        samples = list(self._read())
        ready = sum(sample.state in ("ready", "half_open", "ejected") for sample in samples)
        yield GaugeMetricFamily("yardstick_engines_ready", "Engines that take requests.", value=ready)
        by_model = GaugeMetricFamily("yardstick_model_engines_ready", "Engines of a model that take requests.", labels=["model"])
        waiting = GaugeMetricFamily(
            "yardstick_model_requests_waiting", "Requests that wait for an engine of a model to be ready.", labels=["model"]
        )
        adapters = GaugeMetricFamily("yardstick_adapters", "Adapters of a model that an engine has.", labels=["model"])
        for known in self._models():
            self._found(known.name)
            by_model.add_metric([known.name], known.ready)
            waiting.add_metric([known.name], known.waiting)
            adapters.add_metric([known.name], known.adapters)
        yield from (by_model, waiting, adapters)
        states = GaugeMetricFamily("yardstick_engines", "Engines by state.", labels=["model", "state"])
        for (model, state), count in Tally((sample.model, sample.state) for sample in samples).items():
            states.add_metric([model, state], count)
        yield states
        in_flight = GaugeMetricFamily(
            "yardstick_engine_requests_in_flight", "Requests in progress on an engine.", labels=["engine", "model"]
        )
        tokens = GaugeMetricFamily(
            "yardstick_engine_tokens_in_flight", "Tokens of the requests in progress on an engine.", labels=["engine", "model"]
        )
        for sample in samples:
            in_flight.add_metric([sample.url, sample.model], sample.in_flight)
            tokens.add_metric([sample.url, sample.model], sample.tokens)
        yield from (in_flight, tokens)
