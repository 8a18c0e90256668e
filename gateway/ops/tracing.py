"""Traces of requests: the hooks that other modules call, and the first span of each request.

A context variable holds the trace of a request, so all tasks of a request find it. While tracing is off, or a request is not
sampled, a hook costs one look at the variable. Attributes are numbers, names of models and codes: never texts, items, tokens
or keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from itertools import islice
from types import TracebackType
from urllib.parse import urlsplit

from yardstick_llm.gateway.errors import GatewayError
from yardstick_llm.gateway.ops.access_log import PROBES, RequestRecord, outcome_of
from yardstick_llm.tracing.context import TraceContext, new_trace_id, read_context
from yardstick_llm.tracing.export import Exporter
from yardstick_llm.tracing.sampling import Sampler
from yardstick_llm.tracing.spans import Kind, Span, Value

MAX_SPANS = 128
"""Most spans of one request; the first span counts those that are left out."""
MAX_REASONS = 64
"""Most finish reasons that are recorded."""
OPERATIONS = {
    "/": "infer",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/embed": "embeddings",
    "/v1/embed": "embeddings",
    "/v2/embed": "embeddings",
    "/embeddings": "embeddings",
}
"""``gen_ai.operation.name`` of the routes that OpenTelemetry has a name for, and of the one without parts; that of others is the
last part of the route."""

_current: ContextVar[Trace | None] = ContextVar("yardstick_trace", default=None)


class Stage(Span):
    """A span as a context manager. An error that leaves the block ends the span as failed; its message is not recorded."""

    __slots__ = ()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, asyncio.CancelledError):
            self.attributes["yardstick.cancelled"] = True
        self.finish(code_of(error))


_NOTHING: AbstractContextManager[Stage | None] = nullcontext()


class Trace:
    """The spans of one request that is traced."""

    def __init__(self, trace_id: int, parent: TraceContext | None) -> None:
        self.spans: list[Stage] | None = []
        """None once the request has ended: a task that outlives it records nothing."""
        self._left_out = 0
        self._state = parent.state if parent is not None else ""
        self._trace_id = trace_id
        self.first = Stage("request", trace_id, parent.span_id if parent else 0, "server", parent is not None, self._state)

    def stage(self, name: str, kind: Kind = "internal") -> AbstractContextManager[Stage | None]:
        """Begin a part of the request."""
        if self.spans is None or len(self.spans) >= MAX_SPANS:
            self._left_out += 1
            return _NOTHING
        stage = Stage(name, self._trace_id, self.first.span_id, kind, state=self._state)
        self.spans.append(stage)
        return stage

    @property
    def exemplar(self) -> dict[str, str]:
        """Labels that lead from a metric to this trace."""
        return {"trace_id": f"{self._trace_id:032x}", "span_id": f"{self.first.span_id:016x}"}

    def end(self, record: RequestRecord, method: str, route: str) -> list[Span]:
        """End the request, and return its spans."""
        stages, self.spans = self.spans or [], None
        first = self.first
        first.name = method if route == "none" else f"{method} {route}"
        first.attributes |= _attributes(record, method, route)
        if self._left_out:
            first.attributes["yardstick.spans_left_out"] = self._left_out
        if record.first_byte is not None:
            first.events.append(("first_byte", first.begin + round(1e9 * (record.first_byte - record.began))))
        first.finish()
        if record.error is not None:
            first.attributes["error.type"] = record.error
            first.failed = record.status >= 500 or record.broke
        for stage in stages:
            if not stage.end:  # a task that was abandoned
                stage.finish()
        spans: list[Span] = [first, *stages]
        if stages and record.first_byte is not None:
            answer = Span("gateway.answer", self._trace_id, first.span_id, state=self._state, end=first.end)
            answer.begin = max(stage.end for stage in stages)
            spans.append(answer)
        return spans


class Tracer:
    """Decides which requests are traced, and hands the spans of those that have ended to ``exporter``."""

    def __init__(self, sampler: Sampler, exporter: Exporter) -> None:
        self._sampler = sampler
        self.exporter = exporter

    def begin(self, path: str, headers: Mapping[bytes, bytes]) -> Trace | None:
        """Begin the trace of a request in the current task; None if it is not sampled. Malformed trace headers are ignored."""
        if path in PROBES:
            return None
        parent = None
        if (given := headers.get(b"traceparent")) is not None:
            parent = read_context(given.decode("latin-1"), headers.get(b"tracestate", b"").decode("latin-1"))
        trace_id = new_trace_id() if parent is None else parent.trace_id
        trace = Trace(trace_id, parent) if self._sampler.samples(trace_id, parent) else None
        _current.set(trace)
        return trace


def stage(name: str) -> AbstractContextManager[Stage | None]:
    """Return a context manager that records its block as a part of the request. It yields None if the request is not traced."""
    trace = _current.get()
    return _NOTHING if trace is None else trace.stage(name)


def attempt(url: str, model: str, number: int, tokens: int) -> AbstractContextManager[Stage | None]:
    """As :func:`stage`, for a call of the engine at ``url``, the ``number``-th of a message with a load of ``tokens``."""
    trace = _current.get()
    if trace is None:
        return _NOTHING
    stage = trace.stage("gateway.attempt", "client")
    if isinstance(stage, Stage):
        parts = urlsplit(url)
        stage.attributes |= {
            "server.address": parts.hostname or "",
            "server.port": parts.port or (443 if parts.scheme == "https" else 80),
            "gen_ai.request.model": model,
            "yardstick.attempt": number,
            "yardstick.tokens": tokens,
        }
    return stage


def finished(reasons: Iterable[str | None]) -> None:
    """Record why the sequences of the request ended; None: one did not. ``reasons`` is read only if the request is traced."""
    trace = _current.get()
    if trace is not None:
        trace.first.attributes["gen_ai.response.finish_reasons"] = [*filter(None, islice(reasons, MAX_REASONS))]


def code_of(error: BaseException | None) -> str | None:
    """Return the code of an error; None for other ends of a block: an iterator is closed, a task is cancelled."""
    if error is None or isinstance(error, GeneratorExit | asyncio.CancelledError):
        return None
    return (error.code or error.type) if isinstance(error, GatewayError) else type(error).__name__


def _attributes(record: RequestRecord, method: str, route: str) -> dict[str, Value]:
    """Attributes of a request: OpenTelemetry's conventions for HTTP servers and generative models, and our own."""
    account = record.account
    given: dict[str, Value | None] = {
        "http.request.method": method,
        "http.route": None if route == "none" else route,
        "http.response.status_code": record.status,
        "gen_ai.operation.name": OPERATIONS.get(route, route.rpartition("/")[2]) if account.model else None,
        "gen_ai.provider.name": "yardstick" if account.model else None,
        "gen_ai.request.model": account.model,
        "gen_ai.usage.input_tokens": account.prompt_tokens or None,
        "gen_ai.usage.output_tokens": account.completion_tokens or None,
        "gen_ai.usage.cache_read.input_tokens": account.cached_tokens or None,
        "yardstick.items": account.items or None,
        "yardstick.cache.hits": account.cache_hits or None,
        "yardstick.queue_seconds": account.queue_seconds or None,
        "yardstick.outcome": outcome_of(record),
        "yardstick.request_id": record.id.decode(),
    }
    return {name: value for name, value in given.items() if value is not None}
