"""The pod's Prometheus metrics: every name in one place, each a reading of :class:`engine.wire.Stats`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine import wire

GAUGES = {
    "yardstick_engine_requests_running": ("Requests in progress.", "running"),
    "yardstick_engine_requests_waiting": ("Requests in the queue.", "waiting"),
    "yardstick_engine_wait_seconds": ("Expected queue time of a new request, for the tenant with the longest.", "wait_seconds"),
    "yardstick_engine_tenants": ("Tenants with a request that has not ended.", "tenants"),
    "yardstick_engine_slots": ("Slots for keys and values, one a token.", "slots_total"),
    "yardstick_engine_slots_free": ("Free slots.", "slots_free"),
    "yardstick_engine_attention_fallback": ("1 if `auto` could not choose the fastest attention backend.", "attention_fallback"),
    "yardstick_engine_slots_cached": ("Slots that only the prefix cache holds.", "slots_cached"),
    "yardstick_engine_slots_items": ("Slots of items that came first, in the prefix cache.", "slots_items"),
    "yardstick_engine_item_bytes": ("Bytes of keys and values of these items.", "item_bytes"),
    "yardstick_engine_slots_pinned": ("Slots of pinned items.", "slots_pinned"),
    "yardstick_engine_slots_reserved": ("Slots that items leave to generations and queries.", "slots_reserved"),
    "yardstick_engine_adapters": ("LoRA adapters that requests may name.", "adapters"),
    "yardstick_engine_adapter_bytes": ("Host memory of LoRA adapters, of unloaded ones in use as well.", "adapter_bytes"),
    "yardstick_engine_requests_compiling": ("Requests that wait until their grammar is compiled.", "compiling"),
    "yardstick_engine_grammar_bytes": ("Memory of compiled grammars, kept ones and those in use.", "grammar_bytes"),
    "yardstick_engine_image_bytes": ("Embeddings of images on the device.", "image_bytes"),
}
COUNTERS = {
    "yardstick_engine_steps": ("Forward passes.", "steps"),
    "yardstick_engine_replayed_steps": ("Forward passes replayed from a CUDA graph.", "replayed_steps"),
    "yardstick_engine_computed_tokens": ("Tokens computed by the model.", "computed_tokens"),
    "yardstick_engine_cached_tokens": ("Prefix tokens found in the prefix cache.", "cached_tokens"),
    "yardstick_engine_scored_items": ("Items scored that came before the query.", "scored_items"),
    "yardstick_engine_cached_items": ("Of these, items that were in the prefix cache whole.", "cached_items"),
    "yardstick_engine_evicted_item_tokens": ("Tokens of items evicted from the prefix cache.", "evicted_item_tokens"),
    "yardstick_engine_displaced_pins": ("Pins that ended early for those of another cache salt.", "displaced_pins"),
    "yardstick_engine_unpinned_items": ("Items that were to be pinned and found no room.", "unpinned_items"),
    "yardstick_engine_draft_tokens": ("Tokens of prompt-lookup drafts computed by the model.", "draft_tokens"),
    "yardstick_engine_accepted_draft_tokens": ("Of these, tokens that were drawn.", "accepted_draft_tokens"),
    "yardstick_engine_lenvm_tokens": ("Tokens computed by the length model, candidates included.", "lenvm_tokens"),
    "yardstick_engine_guided_draws": ("Draws that the length model evaluated.", "guided_draws"),
    "yardstick_engine_decided_draws": ("Draws of guided requests that were decided without the length model.", "decided_draws"),
    "yardstick_engine_replayed_lenvm_passes": (
        "Passes of the length model over candidates, replayed from a CUDA graph.",
        "replayed_lenvm_passes",
    ),
    "yardstick_engine_late_compilations": (
        "Triton kernels compiled or loaded after the engine was ready; 0 is expected.",
        "late_compilations",
    ),
    "yardstick_engine_structured_requests": ("Generations whose output follows a grammar.", "structured_requests"),
    "yardstick_engine_compiled_grammars": ("Grammars compiled.", "compiled_grammars"),
    "yardstick_engine_refused_grammars": ("Grammars that are not valid or too complex.", "refused_grammars"),
    "yardstick_engine_grammar_compile_seconds": (
        "Time spent in checking and compiling grammars, of refused ones as well.",
        "compile_seconds",
    ),
    "yardstick_engine_grammar_masks": ("Sets of allowed tokens computed from grammars.", "masks"),
    "yardstick_engine_adapter_loads": ("LoRA adapters loaded.", "adapter_loads"),
    "yardstick_engine_adapter_load_failures": ("LoRA adapters that could not be loaded.", "adapter_load_failures"),
    "yardstick_engine_adapter_load_seconds": ("Time spent in reading LoRA adapters, beside the loop.", "adapter_load_seconds"),
    "yardstick_engine_adapter_swaps": ("Copies of a LoRA adapter from host memory to a slot of the device.", "adapter_swaps"),
    "yardstick_engine_computed_images": ("Images embedded by vision towers.", "computed_images"),
    "yardstick_engine_cached_images": ("Times that a request found embeddings of an image.", "cached_images"),
    "yardstick_engine_tower_seconds": ("Time that vision towers took.", "tower_seconds"),
    "yardstick_engine_grammar_mask_seconds": ("Time spent in computing them, of all threads together.", "mask_seconds"),
}


REFUSALS = {
    "invalid": "refused_invalid",
    "queue_full": "refused_queue",
    "wait": "refused_wait",
    "unknown_adapter": "refused_adapter",
    "displaced": "displaced",
}
"""Field of :class:`engine.wire.Stats` by the label ``reason``."""


class StatsCollector(Collector):
    """Metrics of one snapshot."""

    def __init__(self, stats: wire.Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for name, (text, field) in GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(self._stats, field))
        both = self._stats.running + self._stats.waiting
        yield GaugeMetricFamily("yardstick_engine_requests", "Requests in progress and in the queue.", value=both)
        for name, (text, field) in COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(self._stats, field))
        text = "Requests refused, or displaced from a full queue."
        refused = CounterMetricFamily("yardstick_engine_refused", text, labels=["reason"])
        for reason, field in REFUSALS.items():
            refused.add_metric([reason], getattr(self._stats, field))
        yield refused


class _Silence(Collector):
    """Age of the loop's last beat. It rises while the loop hangs."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def collect(self) -> Iterator[Metric]:
        text = "Time since the loop completed a step or reported that it is idle."
        yield GaugeMetricFamily("yardstick_engine_last_step_seconds", text, value=self._seconds)


class _DroppedSpans(Collector):
    """The number of dropped spans."""

    def __init__(self, dropped: int) -> None:
        self._dropped = dropped

    def collect(self) -> Iterator[Metric]:
        text = "Spans that were dropped because the collector of traces is away, too slow, or refused them."
        yield CounterMetricFamily("yardstick_engine_spans_dropped", text, value=self._dropped)


def render(stats: wire.Stats | None, silent_seconds: float | None = None, dropped_spans: int | None = None) -> str:
    """Prometheus text. ``stats`` None: before the first step. ``silent_seconds`` None: before the model is loaded.
    ``dropped_spans`` None: requests are not traced."""
    registry = CollectorRegistry()
    if stats is not None:
        registry.register(StatsCollector(stats))
    if silent_seconds is not None:
        registry.register(_Silence(silent_seconds))
    if dropped_spans is not None:
        registry.register(_DroppedSpans(dropped_spans))
    return generate_latest(registry).decode()
