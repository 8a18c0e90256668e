"""All metrics of the gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from gateway.metrics.adapters import AdapterMetrics
from gateway.metrics.base import Metrics
from gateway.metrics.catalogues import CatalogueMetrics
from gateway.metrics.collectors import (
    DroppedLinesCollector,
    DroppedSpansCollector,
    KeyFileCollector,
    KeySample,
    ModelSample,
    ReplicaSample,
    ReplicasCollector,
    SingleMetric,
)
from gateway.metrics.engines import EngineMetrics
from gateway.metrics.images import ImageMetrics
from gateway.metrics.item_caches import ItemCacheSample, ItemCachesCollector
from gateway.metrics.keys import KeyMetrics
from gateway.metrics.model_labels import ModelLabels
from gateway.metrics.process import ProcessMetrics
from gateway.metrics.text import TextMetrics

if TYPE_CHECKING:
    from gateway.logs.account import Account

# Disables the start time of each series, which no dashboard reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

LOOKUP_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
"""Upper bounds of the buckets for cache lookups, which take at most 0.05 s by default."""

_NAMES = frozenset(("key", "engine"))
"""Labels that name API keys and engines."""
_END = b"# EOF\n"
"""Last line of a document in OpenMetrics."""


class Telemetry(Metrics):
    """The metrics of one application, in their own registry. Labels have few values; no text from clients is a label."""

    def __init__(self, *, usage_keys: int = 0) -> None:
        """``usage_keys``: see :class:`KeyMetrics`."""
        super().__init__(CollectorRegistry())
        self._label = ModelLabels()
        self.engines = EngineMetrics(self._registry, self._label)
        self.catalogues = CatalogueMetrics(self._registry, self._label)
        self.adapters = AdapterMetrics(self._registry)
        self.keys = KeyMetrics(self._registry, usage_keys)
        self.text = TextMetrics(self._registry)
        self.images = ImageMetrics(self._registry)
        self.process = ProcessMetrics(self._registry)
        self.in_flight = 0
        """Requests in progress, without probes and reads of metrics. It is a plain number, because it changes twice per request."""
        gauge = self._gauge("requests_in_flight", "Requests in progress.")
        gauge.set_function(lambda: self.in_flight)
        self.waiting = self._gauge("requests_waiting", "Requests that wait for an engine to be ready.")
        self._fallbacks = self._counter("fallbacks", "Requests that the fallback of a model took.", "model", "fallback")
        self._stored_responses = self._counter("stored_responses", "Responses to store, by outcome: stored or dropped.", "result")
        self._requests = self._counter("requests", "Requests answered.", "route", "model", "status")
        labels = ("route", "model")
        self._seconds = self._histogram("request_seconds", "Time from a request to the end of its answer.", labels=labels)
        self._first_seconds = self._histogram(
            "first_byte_seconds", "Time from a request to the start of its answer.", labels=(*labels, "stream")
        )
        self._broken = self._counter("broken_streams", "Streams that ended with an error after status 200.", "model", "code")
        self._tokens = self._counter("tokens", "Tokens of answers.", "model", "kind")
        self._items = self._counter("items", "Items scored, by the source of the result.", "model", "source")
        self._guided = self._counter(
            "length_guided_prompts", "Prompts continued with length guidance, by mode or constraint.", "model", "mode"
        )
        self._structured = self._counter("structured_prompts", "Prompts whose output followed a grammar.", "model")
        self._tool_calls = self._counter(
            "tool_calls", "Tool calls in answers, by format, and whether they could be read.", "format", "result"
        )
        self._lenvm_values = self._counter("lenvm_values", "Texts that the length model evaluated for /v1/length.", "model")
        self._lookups = self._counter("cache_lookups", "Results looked up in the cache.", "model", "result")
        self._lookup_seconds = self._histogram("cache_lookup_seconds", "One request's lookup.", buckets=LOOKUP_SECONDS)
        self._cache_writes = self._counter("cache_writes", "Results to write to Redis, by outcome.", "result")
        self._redis_up = self._gauge("redis_available", "Whether Redis is in use: 0 while it is unavailable.")
        self._redis_errors = self._counter(
            "redis_errors", "Calls of Redis that failed, by kind: timeout, error, full or disk.", "kind"
        )
        self._limited = self._counter("limited", "Requests refused because a key's limit was reached.", "key", "limit")
        self._settlements_lost = self._counter(
            "settlements_lost", "Ended requests whose lease and tokens were not settled in Redis."
        )
        self._key_reloads = self._counter("key_reloads", "Changes of the key file, by result: loaded, revoked or broken.", "result")

        self._rejected = self._counter(
            "rejected_requests", "Requests and connections refused by the HTTP edge, by reason.", "reason"
        )
        self._open_connections = self._gauge("open_connections", "Open connections of clients.")
        self._bytes_in_flight = self._gauge("bytes_in_flight", "Bytes of the bodies of requests in progress.")
        self._uploads = self._gauge("uploads", "Requests whose body is arriving.")

        self._children()

    def rejected(self, reason: str) -> None:
        """Count a request or a connection that was refused before routing; docs/http.md lists the reasons."""
        self._rejected.labels(reason).inc()

    def watch_connections(self, read: Callable[[], int]) -> None:
        """Report the open connections that ``read`` returns."""
        self._open_connections.set_function(read)

    def watch_bodies(self, read_bytes: Callable[[], int], read_uploads: Callable[[], int]) -> None:
        """Report the bytes of bodies and the uploads in progress that the functions return."""
        self._bytes_in_flight.set_function(read_bytes)
        self._uploads.set_function(read_uploads)

    def answered(
        self,
        route: str,
        model: str | None,
        status: int,
        first_seconds: float,
        seconds: float,
        exemplar: dict[str, str] | None = None,
        *,
        stream: bool = False,
    ) -> None:
        """Record a finished request to ``route`` (a template, not a path). ``model``: None if the request named no known model.
        ``exemplar``: labels that lead to its trace. ``stream``: whether the answer was a stream of events."""
        requests, first, whole = self._answered(route, self._label(model), status, stream)
        requests.inc()
        first.observe(first_seconds, exemplar)
        whole.observe(seconds, exemplar)

    def broke(self, model: str | None, code: str) -> None:
        """Count a stream that ended with an error event of this code after its beginning."""
        self._broken.labels(self._label(model), code).inc()

    def scored(self, account: Account) -> None:
        """Count an answered score request."""
        from_cache, from_engine = self._scored(self._label(account.model))
        from_cache.inc(account.cache_hits)
        from_engine.inc(account.items - account.cache_hits)
        self._count(account)

    def generated(self, account: Account) -> None:
        """Count the generations of a request that was answered or abandoned."""
        self._count(account)
        self._completions(self._label(account.model)).inc(account.completion_tokens)

    def guided(self, model: str, mode: str, prompts: int) -> None:
        """Count ``prompts`` that were continued with ``mode``, a guidance mode or constraint."""
        self._guided.labels(self._label(model), mode).inc(prompts)

    def structured(self, model: str, prompts: int) -> None:
        """Count ``prompts`` whose output followed a grammar."""
        self._structured.labels(self._label(model)).inc(prompts)

    def tools_called(self, format: str, calls: int, malformed: int) -> None:
        """Count the tool calls of a prompt's answers: those that have begun, and those that broke off or were passed on as text."""
        if calls:
            self._tool_calls.labels(format, "called").inc(calls)
        if malformed:
            self._tool_calls.labels(format, "malformed").inc(malformed)

    def valued(self, account: Account) -> None:
        """Count an answered length request."""
        self._lenvm_values.labels(self._label(account.model)).inc(account.items)
        self._count(account)

    def fell_back(self, model: str, fallback: str) -> None:
        """Count a request for ``model`` that ``fallback`` takes."""
        self._fallbacks.labels(self._label(model), self._label(fallback)).inc()

    def response_stored(self, result: str) -> None:
        """Count a response that was ``stored``, or ``dropped`` because there was no room or the store was away."""
        self._stored_responses.labels(result).inc()

    def watch_log(self, dropped: Callable[[], int]) -> None:
        """Report the log lines ``dropped`` so far whenever the metrics are read."""
        self._registry.register(DroppedLinesCollector(dropped))

    def watch_traces(self, dropped: Callable[[], int]) -> None:
        """Report the spans ``dropped`` so far whenever the metrics are read."""
        self._registry.register(DroppedSpansCollector(dropped))

    def watch_replicas(self, read: Callable[[], Iterable[ReplicaSample]], models: Callable[[], Iterable[ModelSample]]) -> None:
        """Report the replicas and models that these functions return whenever the metrics are read. Series of removed replicas
        disappear."""
        self._registry.register(ReplicasCollector(read, models, self._begin))

    def watch_item_caches(self, read: Callable[[], Iterable[ItemCacheSample]]) -> None:
        """Report what engines tell of their items, which ``read`` returns whenever the metrics are read."""
        self._registry.register(ItemCachesCollector(read))

    def looked_up(self, model: str, hits: int, misses: int, seconds: float) -> None:
        """Record the cache lookup of a request."""
        found, missing = self._looked_up(self._label(model))
        found.inc(hits)
        missing.inc(misses)
        self._lookup_seconds.observe(seconds)

    def cache_written(self, result: str, count: int) -> None:
        """Count results that were ``stored`` in Redis, or ``dropped`` because the queue was full or Redis was away."""
        self._cache_writes.labels(result).inc(count)

    def redis_available(self, available: bool) -> None:
        """Record the state of the circuit breaker: closed if ``available``."""
        self._redis_up.set(available)

    def redis_failed(self, kind: str) -> None:
        """Count a failed call of Redis."""
        self._redis_errors.labels(kind).inc()

    def limited(self, key: str, limit: str) -> None:
        """Count a request that was refused because of a limit of the key with this name."""
        self._limited.labels(key, limit).inc()

    def settlements_lost(self, count: int) -> None:
        """Count ended requests that could not be settled in Redis."""
        self._settlements_lost.inc(count)

    def keys_reloaded(self, result: str) -> None:
        """Count a change of the key file: it was ``loaded``, it ``revoked`` all keys (deleted or empty), or it is ``broken``."""
        self._key_reloads.labels(result).inc()

    def watch_keys(self, read: Callable[[], KeySample]) -> None:
        """Report the state of the key file that ``read`` returns whenever the metrics are read."""
        self._registry.register(KeyFileCollector(read))

    def exposition(self, *, open_metrics: bool = False, names: bool = True) -> Iterator[bytes]:
        """Yield all metrics, one by one, because all together take some milliseconds: as OpenMetrics 1.0, which has exemplars, or
        in Prometheus's text format. ``names``: with those that name API keys or engines."""
        encode = openmetrics.generate_latest if open_metrics else generate_latest
        for metric in self._registry.collect():
            if not names and metric.samples and not _NAMES.isdisjoint(metric.samples[0].labels):
                continue
            yield encode(SingleMetric(metric)).removesuffix(_END)
        if open_metrics:
            yield _END

    def _count(self, account: Account) -> None:
        prompt, cached = self._prompts(self._label(account.model))
        prompt.inc(account.prompt_tokens)
        if account.cached_tokens:
            cached.inc(account.cached_tokens)

    def _children(self) -> None:
        """Cache the labelled metrics: finding one costs more than counting with it. Begin the counters that an alert reads at 0."""
        for kind in ("full", "disk"):
            self._redis_errors.labels(kind)
        self._stored_responses.labels("dropped")
        self._answered = cache(
            lambda route, model, status, stream: (
                self._requests.labels(route, model, status),
                self._first_seconds.labels(route, model, "true" if stream else "false"),
                self._seconds.labels(route, model),
            )
        )
        self._looked_up = cache(lambda model: (self._lookups.labels(model, "hit"), self._lookups.labels(model, "miss")))
        self._scored = cache(lambda model: (self._items.labels(model, "cache"), self._items.labels(model, "engine")))
        self._completions = cache(lambda model: self._tokens.labels(model, "completion"))
        self._prompts = cache(lambda model: (self._tokens.labels(model, "prompt"), self._tokens.labels(model, "prompt_cached")))

    def _begin(self, model: str) -> None:
        """Start counters of ``model`` at 0 that alerts and shares read: Prometheus counts no increase at the first value."""
        self._looked_up(self._label(model))
        self.engines.begin(model)
