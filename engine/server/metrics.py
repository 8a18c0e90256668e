"""The pod's Prometheus metrics: each a field of :class:`engine.wire.Stats`, whose docstring is its help."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from yardstick_llm.engine import wire
from yardstick_llm.engine.server.options import attribute_docstrings
from yardstick_llm.engine.settings import EngineSettings

GAUGES = (
    *("running", "waiting", "wait_seconds", "tenants", "slots_total", "slots_free", "attention_fallback", "slots_cached"),
    *("slots_items", "item_bytes", "slots_reserved", "adapters", "adapter_bytes", "compiling", "grammar_bytes"),
    "image_bytes",
)
"""Fields of :class:`engine.wire.Stats` that are gauges; the others are counters."""
NAMES = {
    "running": "requests_running",
    "waiting": "requests_waiting",
    "slots_total": "slots",
    "compiling": "requests_compiling",
    "compile_seconds": "grammar_compile_seconds",
    "masks": "grammar_masks",
    "mask_seconds": "grammar_mask_seconds",
}
"""Metrics, without ``yardstick_engine_``, that are not called as their field."""
REFUSALS = {
    "invalid": "refused_invalid",
    "queue_full": "refused_queue",
    "wait": "refused_wait",
    "unknown_adapter": "refused_adapter",
    "displaced": "displaced",
}
"""Field of :class:`engine.wire.Stats` by the label ``reason``."""


class _Collector(Collector):
    """Metrics of one snapshot."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _metrics(stats: wire.Stats) -> Iterator[Metric]:
    refused = set(REFUSALS.values())
    for field, text in attribute_docstrings(wire.Stats).items():
        kind = GaugeMetricFamily if field in GAUGES else CounterMetricFamily
        if field not in refused:
            yield kind(f"yardstick_engine_{NAMES.get(field, field)}", text, value=getattr(stats, field))
    both = stats.running + stats.waiting
    yield GaugeMetricFamily("yardstick_engine_requests", "Requests in progress and in the queue.", value=both)
    counter = CounterMetricFamily(
        "yardstick_engine_refused", "Requests refused, or displaced from a full queue.", labels=["reason"]
    )
    for reason, field in REFUSALS.items():
        counter.add_metric([reason], getattr(stats, field))
    yield counter


def render(
    stats: wire.Stats | None,
    silent_seconds: float | None = None,
    dropped_spans: int | None = None,
    settings: EngineSettings | None = None,
    *,
    is_up: bool = False,
) -> str:
    """Prometheus text. ``stats`` None: before the first step. ``silent_seconds``: age of the loop's last beat; None before the
    model is loaded. ``dropped_spans`` None: requests are not traced. ``is_up``: whether the nodes of ``settings`` compute together;
    of interest where there are several."""
    metrics = [] if stats is None else list(_metrics(stats))
    if silent_seconds is not None:
        text = "Time since the loop completed a step or reported that it is idle."
        metrics.append(GaugeMetricFamily("yardstick_engine_last_step_seconds", text, value=silent_seconds))
    if dropped_spans is not None:
        text = "Spans that were dropped because the collector of traces is away, too slow, or refused them."
        metrics.append(CounterMetricFamily("yardstick_engine_spans_dropped", text, value=dropped_spans))
    if settings is not None and settings.nnodes > 1:
        text = "Whether this node computes together with all others of its engine."
        up = GaugeMetricFamily("yardstick_engine_node_up", text, labels=["node_rank", "nnodes"])
        up.add_metric([str(settings.node_rank), str(settings.nnodes)], is_up)
        metrics.append(up)
    registry = CollectorRegistry()
    registry.register(_Collector(metrics))
    return generate_latest(registry).decode()
