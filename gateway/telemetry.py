"""All metrics of the gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from gateway.collectors import (
    DroppedLinesCollector,
    DroppedSpansCollector,
    KeyFileCollector,
    KeySample,
    ModelSample,
    ReplicaSample,
    ReplicasCollector,
    SingleMetric,
)
from gateway.model_labels import ModelLabels

if TYPE_CHECKING:
    from gateway.context import Account

# Disables the start time of each series, which no dashboard reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper bounds of the histograms' buckets."""
LOOKUP_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
"""Upper bounds of the buckets for cache lookups, which take at most 0.05 s by default."""


_END = b"# EOF\n"
"""Last line of a document in OpenMetrics."""
MOST_ADAPTER_LABELS = 256
"""Most adapters with a series of their own."""
OTHER_ADAPTERS = ":other"
"""Stands for all others; no adapter can have this name."""
SUB_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class Telemetry:
    """The metrics of one application, in their own registry. Labels have few values; no text from clients is a label."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._label = ModelLabels()
        self.in_flight = 0
        """Requests in progress. It is a plain number, because it changes twice per request and is read only with the metrics."""
        gauge = Gauge("yardstick_requests_in_flight", "Requests in progress.", registry=self._registry)
        gauge.set_function(lambda: self.in_flight)
        self.waiting = Gauge("yardstick_requests_waiting", "Requests that wait for an engine to be ready.", registry=self._registry)
        self._ejections = self._counter("engine_ejections", "Ejections of engines after repeated failures.", "model")
        self._silences = self._counter("engine_silences", "Engines that did not answer a probe in time.", "model")
        self._resumptions = self._counter("resumed_sequences", "Generated sequences that continued on another engine.", "model")
        self._fallbacks = self._counter("fallbacks", "Requests that the fallback of a model took.", "model", "fallback")
        self._stored_responses = self._counter("stored_responses", "Responses to store, by outcome: stored or dropped.", "result")
        self._retries = self._counter(
            "engine_retries", "Requests sent to another engine, by the failure of the first.", "model", "code"
        )
        self._hedges = self._counter(
            "hedges", "Scores sent to a second engine, by outcome: won, lost or failed.", "model", "result"
        )
        self._hedges_denied = self._counter(
            "hedges_denied", "Late scores not sent to a second engine: budget or saturation.", "model", "reason"
        )
        self._hedge_tokens = self._counter("hedge_tokens", "Tokens of scores sent to a second engine.", "model")
        self._sub_batches = Histogram(
            "yardstick_sub_batches", "Messages to engines for one score request.", buckets=SUB_BATCHES, registry=self._registry
        )
        self._requests = self._counter("requests", "Requests answered.", "route", "model", "status")
        labels = ("route", "model")
        self._seconds = self._histogram("request_seconds", "Time from a request to the end of its answer.", labels=labels)
        self._first_seconds = self._histogram(
            "first_byte_seconds", "Time from a request to the start of its answer.", labels=labels
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
        self._adapter_requests = self._counter("adapter_requests", "Requests answered with an adapter.", "model", "adapter")
        self._adapter_labels: set[tuple[str, str]] = set()
        self._adapter_operations = self._counter(
            "adapter_operations", "Loads, restorations and unloads of adapters on engines, by result.", "operation", "result"
        )
        self._engine_errors = self._counter("engine_errors", "Calls of engines that failed.", "model", "code")
        self._lookups = self._counter("cache_lookups", "Results looked up in the cache.", "model", "result")
        self._lookup_seconds = self._histogram("cache_lookup_seconds", "One request's lookup.", buckets=LOOKUP_SECONDS)
        self._cache_writes = self._counter("cache_writes", "Results to write to Redis, by outcome.", "result")
        self._redis_up = Gauge(
            "yardstick_redis_available", "Whether Redis is in use: 0 while it is unavailable.", registry=self._registry
        )
        self._redis_errors = self._counter("redis_errors", "Calls of Redis that failed, by kind: timeout or error.", "kind")
        self._limited = self._counter("limited", "Requests refused because a key's limit was reached.", "key", "limit")
        self._settlements_lost = self._counter(
            "settlements_lost", "Ended requests whose lease and tokens were not settled in Redis."
        )
        self._key_reloads = self._counter("key_reloads", "Changes of the key file, by result: loaded, revoked or broken.", "result")

        self._rejected = self._counter(
            "rejected_requests", "Requests and connections refused by the HTTP edge, by reason.", "reason"
        )
        self._open_connections = Gauge("yardstick_open_connections", "Open connections of clients.", registry=self._registry)
        self._bytes_in_flight = Gauge(
            "yardstick_bytes_in_flight", "Bytes of the bodies of requests in progress.", registry=self._registry
        )
        self._uploads = Gauge("yardstick_uploads", "Requests whose body is arriving.", registry=self._registry)

        self._blocked = Histogram(
            "yardstick_event_loop_blocked_seconds",
            "Delay of the event loop's due callbacks, if longer than a millisecond.",
            buckets=SECONDS,
            registry=self._registry,
        )
        self._most_blocked = Gauge(
            "yardstick_event_loop_blocked_max_seconds", "Longest of these delays since the start.", registry=self._registry
        )
        self._longest_block = 0.0
        self._collections = self._counter(
            "garbage_collections", "Full collections of garbage: while idle, or overdue because requests never paused.", "reason"
        )
        self._catalogues = {
            name: Gauge(f"yardstick_{name}", f"{text} in the store of catalogues.", registry=self._registry)
            for name, text in (("catalogues", "Catalogues"), ("catalogue_items", "Registered items"), ("catalogue_bytes", "Bytes"))
        }
        self._catalogue_lookups = self._counter(
            "catalogue_lookups", "Registered items looked up, by source: memory of the gateway, or Redis.", "source"
        )
        self._registered = self._counter("registered_items", "Items registered: added, changed or unchanged.", "result")
        self._warmed = self._counter("warmed_items", "Registered items warmed, by what engines did: cached or computed.", "result")
        self._moved = self._counter(
            "moved_items",
            "Items of engines that leave, by what other engines did (cached or computed), or left where the handover ended before.",
            "result",
        )
        self._text_wait = self._histogram("text_wait_seconds", "Time that a request waits for a text worker.")
        self._text_seconds = self._histogram("text_seconds", "Time that a text worker spends on one request.")
        self._text_ends = self._counter("text_workers_ended", "Text workers that were killed or ended by themselves.", "reason")

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

    def blocked(self, seconds: float) -> None:
        """Record that the event loop ran for ``seconds`` without serving what was due."""
        self._blocked.observe(seconds)
        if seconds > self._longest_block:
            self._longest_block = seconds
            self._most_blocked.set(seconds)

    def garbage_collected(self, reason: str) -> None:
        """Count a full garbage collection: while ``idle``, or because it was ``overdue``."""
        self._collections.labels(reason).inc()

    def catalogue_totals(self, catalogues: int, items: int, size: int) -> None:
        """Report the contents of the store of catalogues."""
        for gauge, value in zip(self._catalogues.values(), (catalogues, items, size), strict=True):
            gauge.set(value)

    def watch_catalogues(self, *reads: Callable[[], int]) -> None:
        """Report the numbers of catalogues, of items and of bytes that the functions return whenever the metrics are read."""
        for gauge, read in zip(self._catalogues.values(), reads, strict=True):
            gauge.set_function(read)

    def catalogue_items_found(self, memory: int, redis: int) -> None:
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

    def items_moved(self, cached: int, computed: int) -> None:
        """Count items of an engine that leaves, which another engine has now."""
        self._moved.labels("cached").inc(cached)
        self._moved.labels("computed").inc(computed)

    def items_left(self, items: int) -> None:
        """Count items of an engine that leaves, which no other engine was asked to compute."""
        self._moved.labels("left").inc(items)

    def text_waited(self, seconds: float) -> None:
        """Record how long a request waited for a text worker."""
        self._text_wait.observe(seconds)

    def text_read(self, seconds: float) -> None:
        """Record how long a text worker read a request."""
        self._text_seconds.observe(seconds)

    def text_worker_ended(self, reason: str) -> None:
        """Count a lost text worker: ``slow``, ``template``, ``memory``, ``left`` by its client, or ``crash``."""
        self._text_ends.labels(reason).inc()

    def watch_text_queue(self, read: Callable[[], int]) -> None:
        """Report the number of requests that wait for a text worker whenever the metrics are read."""
        queue = Gauge("yardstick_text_queue", "Requests that wait for a text worker.", registry=self._registry)
        queue.set_function(read)

    def answered(
        self,
        route: str,
        model: str | None,
        status: int,
        first_seconds: float,
        seconds: float,
        exemplar: dict[str, str] | None = None,
    ) -> None:
        """Record a finished request to ``route`` (a template, not a path). ``model``: None if the request named no known model.
        ``exemplar``: labels that lead to its trace."""
        requests, first, whole = self._answered(route, self._label(model), status)
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

    def adapter_answered(self, model: str, adapter: str) -> None:
        """Count a finished request for ``adapter``, a name from an engine's list. Beyond :data:`MOST_ADAPTER_LABELS`, new names are
        counted together, because operators may load any number one after another."""
        labels = (model, adapter)
        if labels not in self._adapter_labels and len(self._adapter_labels) >= MOST_ADAPTER_LABELS:
            labels = (model, OTHER_ADAPTERS)
        self._adapter_labels.add(labels)
        self._adapter_requests.labels(*labels).inc()

    def adapter_operated(self, operation: str, done: int, failed: int) -> None:
        """Count the engines on which an adapter was loaded (``load``), loaded again (``restore``) or unloaded (``unload``)."""
        for result, count in (("done", done), ("failed", failed)):
            if count:
                self._adapter_operations.labels(operation, result).inc(count)

    def engine_failed(self, model: str, code: str) -> None:
        """Count a call that an engine refused, or during which it was lost."""
        self._engine_errors.labels(self._label(model), code).inc()

    def engine_ejected(self, model: str) -> None:
        """Count an engine that gets no requests for a while, because it failed or was slow repeatedly."""
        self._ejections.labels(self._label(model)).inc()

    def engine_silent(self, model: str) -> None:
        """Count an engine in use that left a probe unanswered. ``model``: empty if it is not known."""
        self._silences.labels(self._label(model)).inc()

    def retried(self, model: str, code: str) -> None:
        """Count a request that is about to be sent to another engine."""
        self._retries.labels(self._label(model), code).inc()

    def resumed(self, model: str) -> None:
        """Count a generated sequence that continues on another engine."""
        self._resumptions.labels(self._label(model)).inc()

    def fell_back(self, model: str, fallback: str) -> None:
        """Count a request for ``model`` that ``fallback`` takes."""
        self._fallbacks.labels(self._label(model), self._label(fallback)).inc()

    def response_stored(self, result: str) -> None:
        """Count a response that was ``stored``, or ``dropped`` because there was no room or the store was away."""
        self._stored_responses.labels(result).inc()

    def hedge_sent(self, model: str, tokens: int) -> None:
        """Count the tokens of a hedge."""
        self._hedge_tokens.labels(self._label(model)).inc(tokens)

    def hedge_ended(self, model: str, result: str) -> None:
        """Count a hedge that ``won``, ``lost`` or ``failed``."""
        self._hedges.labels(self._label(model), result).inc()

    def hedge_denied(self, model: str, reason: str) -> None:
        """Count a late score without a hedge, for lack of ``budget`` or because of ``saturation``."""
        self._hedges_denied.labels(self._label(model), reason).inc()

    def split(self, parts: int) -> None:
        """Record the number of sub-batches of a score request."""
        self._sub_batches.observe(parts)

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

    def exposition(self, *, open_metrics: bool = False) -> Iterator[bytes]:
        """Yield all metrics, one by one, because all together take some milliseconds: as OpenMetrics 1.0, which has exemplars, or
        in Prometheus's text format."""
        encode = openmetrics.generate_latest if open_metrics else generate_latest
        for metric in self._registry.collect():
            yield encode(SingleMetric(metric)).removesuffix(_END)
        if open_metrics:
            yield _END

    def _count(self, account: Account) -> None:
        prompt, cached = self._prompts(self._label(account.model))
        prompt.inc(account.prompt_tokens)
        cached.inc(account.cached_tokens)

    def _children(self) -> None:
        """Cache the labelled metrics: finding one costs more than counting with it."""
        self._answered = cache(
            lambda route, model, status: (
                self._requests.labels(route, model, status),
                self._first_seconds.labels(route, model),
                self._seconds.labels(route, model),
            )
        )
        self._looked_up = cache(lambda model: (self._lookups.labels(model, "hit"), self._lookups.labels(model, "miss")))
        self._scored = cache(lambda model: (self._items.labels(model, "cache"), self._items.labels(model, "engine")))
        self._completions = cache(lambda model: self._tokens.labels(model, "completion"))
        self._prompts = cache(lambda model: (self._tokens.labels(model, "prompt"), self._tokens.labels(model, "prompt_cached")))

    def _begin(self, model: str) -> None:
        """Start counters of ``model`` at 0 that alerts and shares read: Prometheus counts no increase at the first value."""
        label = self._label(model)
        self._looked_up(label)
        for counter in (self._ejections, self._silences, self._resumptions):
            counter.labels(label)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"yardstick_{name}", help, labels, registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...] = SECONDS, labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(f"yardstick_{name}", help, labels, buckets=buckets, registry=self._registry)
