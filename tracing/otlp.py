"""Sends spans to a collector with OpenTelemetry's exporter: OTLP over HTTP, in protobuf.

A span of the SDK takes 17 µs where the request runs, one of :mod:`tracing.spans` 1.3 µs. So the exporter's thread makes the SDK's
objects, when the request has ended.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from yardstick_llm.tracing.export import Send, Shutdown
from yardstick_llm.tracing.spans import Span
from yardstick_llm.tracing.version import project_version

PATH = "/v1/traces"
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}


def sender(endpoint: str | None, service: str | None, default_service: str) -> tuple[Send, Shutdown]:
    """Return a function that sends spans to ``endpoint``, the collector's URL without :data:`PATH`, and one that ends this. What is
    None, and all else, is read from OpenTelemetry's variables."""
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # one line for each lost batch, none for each retry
    exporter = OTLPSpanExporter(endpoint=None if endpoint is None else endpoint.removesuffix("/").removesuffix(PATH) + PATH)
    resource = _resource(service, default_service)
    scope = InstrumentationScope("yardstick", project_version())

    def send(spans: Sequence[Span]) -> bool:
        return exporter.export([_readable(span, resource, scope) for span in spans]) is SpanExportResult.SUCCESS

    return send, exporter.shutdown


def _resource(service: str | None, default_service: str) -> Resource:
    """Return the attributes of this process. ``service`` wins over OpenTelemetry's variables, these over ``default_service``."""
    found = Resource.create({"service.version": project_version(), "host.name": socket.gethostname()})
    name = str(found.attributes[SERVICE_NAME])
    if service is None:
        service = default_service if name.startswith("unknown_service") else name
    return found.merge(Resource({SERVICE_NAME: service}))


def _readable(span: Span, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    state = TraceState.from_header([span.state]) if span.state else None
    return ReadableSpan(
        span.name,
        SpanContext(span.trace_id, span.span_id, is_remote=False, trace_flags=_SAMPLED, trace_state=state),
        SpanContext(span.trace_id, span.parent_id, is_remote=span.remote_parent, trace_flags=_SAMPLED) if span.parent_id else None,
        resource,
        span.attributes,
        [Event(name, timestamp=time) for name, time in span.events],
        kind=_KINDS[span.kind],
        status=Status(StatusCode.ERROR) if span.failed else Status(StatusCode.UNSET),
        start_time=span.begin,
        end_time=span.end,
        instrumentation_scope=scope,
    )
