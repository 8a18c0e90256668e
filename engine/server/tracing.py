"""Traces of the pod: the spans of a request that its gateway traces. Made in the server, from the times in the loop's replies.

``engine.score`` or ``engine.generate`` is the whole request, as the server sees it. Within it, ``engine.queue`` ends with the first
step that computes a part of the request, ``engine.prefill`` with the first output, and ``engine.decode`` with the last.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from yardstick_llm.engine import wire
from yardstick_llm.engine.server import channel
from yardstick_llm.tracing.context import read_context
from yardstick_llm.tracing.export import Exporter
from yardstick_llm.tracing.spans import Span


class Tracing:
    """Hands the spans of traced requests to ``exporter``."""

    def __init__(self, model: str, exporter: Exporter) -> None:
        """``model``: its name for clients."""
        self._model = model
        self.exporter = exporter

    def followed(
        self, header: channel.Header, headers: Mapping[str, str], replies: AsyncGenerator[wire.Reply]
    ) -> AsyncGenerator[wire.Reply]:
        """Return ``replies``; of a request whose HTTP ``headers`` say that it is traced, they are recorded as they pass."""
        context = read_context(headers.get("traceparent", ""), headers.get("tracestate", ""))
        if context is None or not context.sampled:
            return replies
        name = "engine.generate" if isinstance(header, channel.GenerateHeader) else "engine.score"
        span = Span(name, context.trace_id, context.span_id, "server", remote_parent=True, state=context.state)
        span.attributes["gen_ai.request.model"] = self._model
        return self._recorded(_Record(span), replies)

    async def _recorded(self, record: _Record, replies: AsyncGenerator[wire.Reply]) -> AsyncGenerator[wire.Reply]:
        try:
            async with aclosing(replies):
                async for reply in replies:
                    record.note(reply)
                    yield reply
        finally:
            self.exporter.put(record.end())


class _Record:
    """Times and counts of one request."""

    def __init__(self, whole: Span) -> None:
        self._whole = whole
        self._first_output = 0
        self._queue_seconds = 0.0
        self._output_tokens = 0
        self._finish_reasons: list[str] = []

    def note(self, reply: wire.Reply) -> None:
        """Take a reply that has just arrived."""
        attributes = self._whole.attributes
        if isinstance(reply, wire.Failed):
            attributes["error.type"] = reply.code
            self._whole.failed = reply.code != "aborted"
            return
        if not self._first_output:
            self._whole.event("first_output")
            self._first_output = self._whole.events[-1][1]
        if isinstance(reply, wire.Scored):
            self._queue_seconds = reply.queue_seconds
            attributes |= {
                "yardstick.rows": len(reply.rows),
                "yardstick.cached_tokens": reply.cached_tokens,
                "yardstick.computed_tokens": reply.computed_tokens,
            }
            return
        self._queue_seconds = max(self._queue_seconds, reply.queue_seconds)
        self._output_tokens += len(reply.tokens)
        if reply.cached_tokens:
            attributes["yardstick.cached_tokens"] = reply.cached_tokens
        if reply.finish is not None:
            self._finish_reasons.append(reply.finish)

    def end(self) -> list[Span]:
        """End the request, and return its spans."""
        whole = self._whole
        whole.finish()
        if whole.name == "engine.generate":
            whole.attributes["yardstick.output_tokens"] = self._output_tokens
            whole.attributes["yardstick.finish_reasons"] = self._finish_reasons
        if not self._first_output:
            return [whole]
        computed = min(whole.begin + round(1e9 * self._queue_seconds), self._first_output)
        spans = [
            whole,
            self._part("engine.queue", whole.begin, computed),
            self._part("engine.prefill", computed, self._first_output),
        ]
        if whole.name == "engine.generate":
            spans.append(self._part("engine.decode", self._first_output, whole.end))
        return spans

    def _part(self, name: str, begin: int, end: int) -> Span:
        whole = self._whole
        return Span(name, whole.trace_id, whole.span_id, state=whole.state, begin=begin, end=end)
