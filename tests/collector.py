"""A collector of traces: an HTTP server that takes OTLP in protobuf and keeps the spans. It can be slow, silent, or refuse."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.processes import wait_until

KINDS = {1: "internal", 2: "server", 3: "client"}


@dataclass(frozen=True)
class Received:
    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the first span of a trace."""
    begin: int
    end: int
    attributes: dict[str, Any]
    events: list[str]
    failed: bool
    state: str
    resource: dict[str, Any] = field(default_factory=dict)


class Collector:
    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.headers: list[dict[str, str]] = []
        """Headers of each request, with lower-case names."""
        self.bodies: list[bytes] = []
        self.status = 200
        self.open = threading.Event()
        """Cleared: requests are not answered."""
        self.open.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def trace(self, trace_id: str, count: int, seconds: float = 10.0) -> list[Received]:
        """The spans of a trace, once at least ``count`` have come, in the order of their beginnings."""

        def found() -> list[Received]:
            return [span for span in self.spans if span.trace_id == trace_id]

        wait_until(lambda: len(found()) >= count, seconds)
        return sorted(found(), key=lambda span: (span.begin, -span.end))

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers["content-encoding"] == "gzip":
                    body = gzip.decompress(body)
                collector.open.wait()
                if self.path != "/v1/traces" or self.headers["content-type"] != "application/x-protobuf":
                    self._answer(400, b"")
                    return
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                if collector.status == 200:
                    collector.bodies.append(body)
                    collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
                self._answer(collector.status, ExportTraceServiceResponse().SerializeToString())

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        return Handler

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def _spans(request: ExportTraceServiceRequest) -> Iterator[Received]:
    for group in request.resource_spans:
        resource = {pair.key: _value(pair.value) for pair in group.resource.attributes}
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Received(
                    resource["service.name"],
                    span.name,
                    KINDS[span.kind],
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    {pair.key: _value(pair.value) for pair in span.attributes},
                    [event.name for event in span.events],
                    span.status.code == 2,
                    span.trace_state,
                    resource,
                )


def _value(value: AnyValue) -> Any:
    if value.WhichOneof("value") == "array_value":
        return [_value(part) for part in value.array_value.values]
    return getattr(value, value.WhichOneof("value") or "string_value")
