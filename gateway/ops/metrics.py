"""The metrics of the gateway, as objects that callers count with: ``telemetry.engines.retries.labels(model, code).inc()``.

Labels have few values; no text from clients is one. docs/operations.md and the pages of each subject describe the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from yardstick_llm.gateway.ops.access_log import Account

# Disables the start time of each series, which no dashboard reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper bounds of the histograms' buckets."""
LOOKUP_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
"""Upper bounds of the buckets for cache lookups, which take at most 0.05 s by default."""
ANSWER_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SUB_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
MOST_LABELS = 256
"""Most models, and most adapters, that have series of their own. A series that was counted stays until the gateway ends, also
if its model is gone."""
OTHER = "other"
"""Label of all models beyond them."""
OTHER_NAMES = ":other"
"""Label of all adapters, and of all keys, beyond those with series of their own; none can have this name."""
_NAMES = frozenset(("key", "engine"))
"""Labels that name API keys and engines."""
_END = b"# EOF\n"
"""Last line of a document in OpenMetrics."""


class ModelLabels:
    """The label of each model: its name for the first ``most`` models, and :data:`OTHER` for all later ones.

    A gateway whose models change for weeks therefore keeps a bounded number of series. Names are those of engines."""

    def __init__(self, most: int = MOST_LABELS) -> None:
        self._labels: dict[str | None, str] = {None: "", "": ""}
        self._most = most + len(self._labels)

    def __call__(self, model: str | None) -> str:
        """Return the label of ``model``; it is empty if the model is not known."""
        label = self._labels.get(model)
        if label is not None:
            return label
        if model is None or len(self._labels) >= self._most:
            return OTHER
        return self._labels.setdefault(model, model)


class ModelCounter:
    """A counter whose first label is a model; :class:`ModelLabels` bounds its values."""

    def __init__(self, counter: Counter, label: ModelLabels) -> None:
        self._counter = counter
        self._label = label

    def labels(self, model: str | None, *labels: str) -> Counter:
        """Return the counter of these labels."""
        return self._counter.labels(self._label(model), *labels)


class Metrics:
    """Makes metrics in one registry; their names begin with ``yardstick_``."""

    def __init__(self, registry: CollectorRegistry, label: ModelLabels | None = None) -> None:
        self._registry = registry
        self._label = label or ModelLabels()

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"yardstick_{name}", help, labels, registry=self._registry)

    def _of_model(self, name: str, help: str, *labels: str) -> ModelCounter:
        return ModelCounter(self._counter(name, help, "model", *labels), self._label)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"yardstick_{name}", help, registry=self._registry)

    def _histogram(self, name: str, help: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"yardstick_{name}", help, labels, buckets=buckets, registry=self._registry)


class EngineMetrics(Metrics):
    """Failures, retries, hedges and sub-batches of calls of engines."""

    def __init__(self, registry: CollectorRegistry, label: ModelLabels | None = None) -> None:
        super().__init__(registry, label)
        self.errors = self._of_model("engine_errors", "Calls of engines that failed.", "code")
        self.retries = self._of_model("engine_retries", "Requests sent to another engine, by the failure of the first.", "code")
        self.ejections = self._of_model("engine_ejections", "Ejections of engines after repeated failures.")
        self.silences = self._of_model("engine_silences", "Engines that did not answer a probe in time.")
        self.resumptions = self._of_model("resumed_sequences", "Generated sequences that continued on another engine.")
        self.missing = self._of_model("model_requests_without_engine", "Times that a request found no engine of a model ready.")
        self.hedges = self._of_model("hedges", "Scores sent to a second engine, by outcome: won, lost or failed.", "result")
        self.hedges_denied = self._of_model(
            "hedges_denied", "Late scores not sent to a second engine: budget or saturation.", "reason"
        )
        self.hedge_tokens = self._of_model("hedge_tokens", "Tokens of scores sent to a second engine.")
        self.sub_batches = self._histogram("sub_batches", "Messages to engines for one score request.", buckets=SUB_BATCHES)

    def begin(self, model: str) -> None:
        """Start counters of ``model`` at 0 that alerts and autoscalers read: Prometheus counts no increase at the first value."""
        for counter in (self.ejections, self.silences, self.resumptions, self.missing):
            counter.labels(model)


class CatalogueMetrics(Metrics):
    """Sizes of catalogues, and operations on their items."""

    def __init__(self, registry: CollectorRegistry, label: ModelLabels | None = None) -> None:
        super().__init__(registry, label)
        self.catalogues = self._gauge("catalogues", "Catalogues in the store of catalogues.")
        self.items = self._gauge("catalogue_items", "Registered items in the store of catalogues.")
        self.bytes = self._gauge("catalogue_bytes", "Bytes in the store of catalogues.")
        self.registered = self._counter("registered_items", "Items registered: added, changed or unchanged.", "result")
        self.item_tokens = self._of_model(
            "item_first_tokens",
            "Tokens of prompts whose item comes first: saved by a cache of results or a prefix cache, or computed.",
            "result",
        )

    def watch(self, totals: Callable[[], tuple[int, int, int]]) -> None:
        """Report the numbers of catalogues, of items and of bytes that ``totals`` returns whenever the metrics are read."""
        self.catalogues.set_function(lambda: totals()[0])
        self.items.set_function(lambda: totals()[1])
        self.bytes.set_function(lambda: totals()[2])

    def items_registered(self, added: int, changed: int, unchanged: int) -> None:
        """Count registered items."""
        for result, count in (("added", added), ("changed", changed), ("unchanged", unchanged)):
            self.registered.labels(result).inc(count)

    def scored(self, model: str | None, tokens: int, saved: int) -> None:
        """Count the ``tokens`` of prompts whose item comes first, and how many of them were ``saved``."""
        self.item_tokens.labels(model, "saved").inc(saved)
        self.item_tokens.labels(model, "computed").inc(max(0, tokens - saved))


class TextMetrics(Metrics):
    """Time that requests wait for text workers and take in them."""

    def __init__(self, registry: CollectorRegistry, label: ModelLabels | None = None) -> None:
        super().__init__(registry, label)
        self.queue = self._gauge("text_queue", "Requests that wait for a text worker.")
        self.wait_seconds = self._histogram("text_wait_seconds", "Time that a request waits for a text worker.")
        self.seconds = self._histogram("text_seconds", "Time that a text worker spends on one request.")
        self.ended = self._counter("text_workers_ended", "Text workers that were killed or ended by themselves.", "reason")
        """``slow``, ``moved`` to the workers for bulk jobs, ``template``, ``memory``, ``left`` by its client, or ``crash``."""


class ImageMetrics(Metrics):
    """Images of requests: received, refused and fetched."""

    def __init__(self, registry: CollectorRegistry, label: ModelLabels | None = None) -> None:
        super().__init__(registry, label)
        self._prepared = self._counter("images", "Images that were prepared for engines; equal ones of a request count once.")
        self._bytes = self._counter("image_bytes", "Bytes of the pixels of these images.")
        self.held = self._gauge("image_bytes_held", "Bytes of fetched files and of pixels that requests in progress hold.")
        self.refused = self._counter("images_refused", "Requests that were refused because of an image.", "reason")
        """See :data:`gateway.images.decode.Reason`; ``room``: the server holds too many images."""
        self._fetches = self._counter("image_fetches", "Images that were fetched from URLs, by outcome.", "result")
        self._fetch_seconds = self._histogram("image_fetch_seconds", "Time that fetching an image takes.")

    def read(self, images: int, pixel_bytes: int) -> None:
        """Record the images of a request, and the bytes of their pixels."""
        self._prepared.inc(images)
        self._bytes.inc(pixel_bytes)

    def fetched(self, result: str, seconds: float) -> None:
        """Record a fetch: ``ok``, ``host`` or ``fetch``."""
        self._fetches.labels(result).inc()
        self._fetch_seconds.observe(seconds)


class ProcessMetrics(Metrics):
    """Times at which the event loop served nothing."""

    def __init__(self, registry: CollectorRegistry, label: ModelLabels | None = None) -> None:
        super().__init__(registry, label)
        self._blocked = self._histogram(
            "event_loop_blocked_seconds", "Delay of the event loop's due callbacks, if longer than a millisecond."
        )
        self._most_blocked = self._gauge("event_loop_blocked_max_seconds", "Longest of these delays since the start.")
        self._longest_block = 0.0
        self.collections = self._counter(
            "garbage_collections", "Full collections of garbage: while idle, or overdue because requests never paused.", "reason"
        )

    def blocked(self, seconds: float) -> None:
        """Record that the event loop ran for ``seconds`` without serving what was due."""
        self._blocked.observe(seconds)
        if seconds > self._longest_block:
            self._longest_block = seconds
            self._most_blocked.set(seconds)


class Telemetry(Metrics):
    """The metrics of one application, in their own registry."""

    def __init__(self, *, usage_keys: int = 0) -> None:
        """``usage_keys``: API keys with series of their own; 0: nothing is counted for keys."""
        registry, label = CollectorRegistry(), ModelLabels()
        super().__init__(registry, label)
        self.engines = EngineMetrics(registry, label)
        self.catalogues = CatalogueMetrics(registry, label)
        self.text = TextMetrics(registry, label)
        self.images = ImageMetrics(registry, label)
        self.process = ProcessMetrics(registry, label)

        # requests
        self.in_flight = 0
        """Requests in progress, without probes and reads of metrics. It is a plain number, because it changes twice per request."""
        self._gauge("requests_in_flight", "Requests in progress.").set_function(lambda: self.in_flight)
        self.waiting = self._gauge("requests_waiting", "Requests that wait for an engine to be ready.")
        requests = self._counter("requests", "Requests answered.", "route", "model", "status")
        seconds = self._histogram("request_seconds", "Time from a request to the end of its answer.", "route", "model")
        first_seconds = self._histogram(
            "first_byte_seconds", "Time from a request to the start of its answer.", "route", "model", "stream"
        )
        self.broken = self._of_model("broken_streams", "Streams that ended with an error after status 200.", "code")
        self.fallbacks = self._counter("fallbacks", "Requests that the fallback of a model took.", "model", "fallback")

        # the edge
        self.rejected = self._counter(
            "rejected_requests", "Requests and connections refused by the HTTP edge, by reason.", "reason"
        )
        """docs/limits.md lists the reasons."""
        self.open_connections = self._gauge("open_connections", "Open connections of clients.")
        self.bytes_in_flight = self._gauge("bytes_in_flight", "Bytes of the bodies of requests in progress.")
        self.uploads = self._gauge("uploads", "Requests whose body is arriving.")

        # results
        tokens = self._of_model("tokens", "Tokens of answers.", "kind")
        items = self._of_model("items", "Items scored, by the source of the result.", "source")
        self.guided = self._of_model(
            "length_guided_prompts", "Prompts continued with length guidance, by mode or constraint.", "mode"
        )
        self._forecasts = self._histogram(
            "expected_tokens", "Tokens that a length model expected of an answer.", "model", buckets=ANSWER_TOKENS
        )
        self.structured = self._of_model("structured_prompts", "Prompts whose output followed a grammar.")
        self.tool_calls = self._counter(
            "tool_calls", "Tool calls in answers, by format, and whether they could be read.", "format", "result"
        )
        self._lenvm_values = self._of_model("lenvm_values", "Texts that the length model evaluated for /v1/length.")
        self.stored_responses = self._counter("stored_responses", "Responses to store, by outcome: stored or dropped.", "result")

        # the cache and Redis
        lookups = self._of_model("cache_lookups", "Results looked up in the cache.", "result")
        self._lookup_seconds = self._histogram("cache_lookup_seconds", "One request's lookup.", buckets=LOOKUP_SECONDS)
        self.cache_writes = self._counter("cache_writes", "Results to write to Redis, by outcome.", "result")
        self.redis_up = self._gauge("redis_available", "Whether Redis is in use: 0 while it is unavailable.")
        self.redis_errors = self._counter(
            "redis_errors", "Calls of Redis that failed, by kind: timeout, error, full, disk or rights.", "kind"
        )

        # keys and adapters
        self.limited = self._counter("limited", "Requests refused because a key's limit was reached.", "key", "limit")
        self.settlements_lost = self._counter(
            "settlements_lost", "Ended requests whose lease and tokens were not settled in Redis."
        )
        self.key_reloads = self._counter(
            "key_reloads", "Changes of the key file, by result: loaded, partial, revoked or broken.", "result"
        )
        self._usage_keys = usage_keys
        self._used_keys: set[str] = set()
        self._key_requests = self._counter("key_requests", "Requests of an API key that were answered.", "key")
        self._key_items = self._counter("key_items", "Items that an API key had scored.", "key")
        self._key_tokens = self._counter(
            "key_tokens", "Tokens of an API key: of prompts, cached ones of these, of completions.", "key", "kind"
        )
        self._adapter_requests = self._counter("adapter_requests", "Requests answered with an adapter.", "model", "adapter")
        self._adapters: set[tuple[str, str]] = set()
        self._adapter_operations = self._counter(
            "adapter_operations", "Loads, restorations and unloads of adapters on engines, by result.", "operation", "result"
        )

        # Counters that an alert reads begin at 0. Children that requests need are cached: finding one costs more than counting.
        for kind in ("full", "disk"):
            self.redis_errors.labels(kind)
        self.stored_responses.labels("dropped")
        self._answered = cache(
            lambda route, model, status, stream: (
                requests.labels(route, model, status),
                first_seconds.labels(route, model, "true" if stream else "false"),
                seconds.labels(route, model),
            )
        )
        self._looked_up = cache(lambda model: (lookups.labels(model, "hit"), lookups.labels(model, "miss")))
        self._scored = cache(lambda model: (items.labels(model, "cache"), items.labels(model, "engine")))
        self._completions = cache(lambda model: tokens.labels(model, "completion"))
        self._prompts = cache(lambda model: (tokens.labels(model, "prompt"), tokens.labels(model, "prompt_cached")))

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

    def forecast(self, model: str, tokens: float) -> None:
        """Record the forecast of the answers to a prompt."""
        self._forecasts.labels(self._label(model)).observe(tokens)

    def fell_back(self, model: str, fallback: str) -> None:
        """Count a request for ``model`` that ``fallback`` takes."""
        self.fallbacks.labels(self._label(model), self._label(fallback)).inc()

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

    def valued(self, account: Account) -> None:
        """Count an answered length request."""
        self._lenvm_values.labels(account.model).inc(account.items)
        self._count(account)

    def _count(self, account: Account) -> None:
        prompt, cached = self._prompts(self._label(account.model))
        prompt.inc(account.prompt_tokens)
        if account.cached_tokens:
            cached.inc(account.cached_tokens)

    def looked_up(self, model: str, hits: int, misses: int, seconds: float) -> None:
        """Record the cache lookup of a request."""
        found, missing = self._looked_up(self._label(model))
        found.inc(hits)
        missing.inc(misses)
        self._lookup_seconds.observe(seconds)

    def used(self, key: str, account: Account) -> None:
        """Count a finished request of the key called ``key``, with the numbers of the access log."""
        if not self._usage_keys:
            return
        if key not in self._used_keys and len(self._used_keys) >= self._usage_keys:
            key = OTHER_NAMES
        else:
            self._used_keys.add(key)
        self._key_requests.labels(key).inc()
        if account.items:
            self._key_items.labels(key).inc(account.items)
        for kind, tokens in (
            ("prompt", account.prompt_tokens),
            ("prompt_cached", account.cached_tokens),
            ("completion", account.completion_tokens),
        ):
            if tokens:
                self._key_tokens.labels(key, kind).inc(tokens)

    def adapter_used(self, model: str, adapter: str) -> None:
        """Count a finished request for ``adapter``, a name from an engine's list. Operators may load any number one after another,
        so there is a bound on series."""
        labels = (model, adapter)
        if labels not in self._adapters and len(self._adapters) >= MOST_LABELS:
            labels = (model, OTHER_NAMES)
        self._adapters.add(labels)
        self._adapter_requests.labels(*labels).inc()

    def adapter_operated(self, operation: str, done: int, failed: int) -> None:
        """Count the engines on which an adapter was loaded (``load``), loaded again (``restore``) or unloaded (``unload``)."""
        for result, count in (("done", done), ("failed", failed)):
            if count:
                self._adapter_operations.labels(operation, result).inc(count)

    def begin(self, model: str) -> None:
        """Start counters of ``model`` at 0 that alerts and shares read: Prometheus counts no increase at the first value."""
        self._looked_up(self._label(model))
        self.engines.begin(model)

    def watch(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Report the metrics that ``collect`` yields whenever the metrics are read."""
        self._registry.register(_Collected(collect))

    def exposition(self, *, open_metrics: bool = False, names: bool = True) -> Iterator[bytes]:
        """Yield all metrics, one by one, because all together take some milliseconds: as OpenMetrics 1.0, which has exemplars, or
        in Prometheus's text format. ``names``: with those that name API keys or engines."""
        encode = openmetrics.generate_latest if open_metrics else generate_latest
        for metric in self._registry.collect():
            if not names and metric.samples and not _NAMES.isdisjoint(metric.samples[0].labels):
                continue
            yield encode(_Collected(partial(iter, [metric]))).removesuffix(_END)
        if open_metrics:
            yield _END


class _Collected(Collector):
    """The metrics that a function yields."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


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
