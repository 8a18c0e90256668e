"""Metrics of calls of engines."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from gateway.metrics.base import Metrics
from gateway.metrics.model_labels import ModelLabels

SUB_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class EngineMetrics(Metrics):
    """Failures, retries, hedges and sub-batches of calls of engines."""

    def __init__(self, registry: CollectorRegistry, label: ModelLabels) -> None:
        super().__init__(registry)
        self._label = label
        self._ejections = self._counter("engine_ejections", "Ejections of engines after repeated failures.", "model")
        self._silences = self._counter("engine_silences", "Engines that did not answer a probe in time.", "model")
        self._resumptions = self._counter("resumed_sequences", "Generated sequences that continued on another engine.", "model")
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
        self._without_engine = self._counter(
            "model_requests_without_engine", "Times that a request found no engine of a model ready.", "model"
        )
        self._sub_batches = self._histogram("sub_batches", "Messages to engines for one score request.", SUB_BATCHES)
        self._engine_errors = self._counter("engine_errors", "Calls of engines that failed.", "model", "code")

    def failed(self, model: str, code: str) -> None:
        """Count a call that an engine refused, or during which it was lost."""
        self._engine_errors.labels(self._label(model), code).inc()

    def ejected(self, model: str) -> None:
        """Count an engine that gets no requests for a while, because it failed or was slow repeatedly."""
        self._ejections.labels(self._label(model)).inc()

    def silent(self, model: str) -> None:
        """Count an engine in use that left a probe unanswered. ``model``: empty if it is not known."""
        self._silences.labels(self._label(model)).inc()

    def without_engine(self, model: str) -> None:
        """Count a request that found no engine of ``model`` ready, whatever becomes of it. It wakes a pool without pods."""
        self._without_engine.labels(self._label(model)).inc()

    def retried(self, model: str, code: str) -> None:
        """Count a request that is about to be sent to another engine."""
        self._retries.labels(self._label(model), code).inc()

    def resumed(self, model: str) -> None:
        """Count a generated sequence that continues on another engine."""
        self._resumptions.labels(self._label(model)).inc()

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

    def begin(self, model: str) -> None:
        """Start counters of ``model`` at 0 that alerts and autoscalers read: Prometheus counts no increase at the first value."""
        for counter in (self._ejections, self._silences, self._resumptions, self._without_engine):
            counter.labels(self._label(model))
