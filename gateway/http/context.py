"""The state of one request from its first byte to the end of its response: id, key, extra headers, costs, times."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from litestar.connection import ASGIConnection
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import GatewayError, InternalError, InvalidRequest, ShuttingDown
from gateway.http.connection import Incoming
from gateway.ids import new_id
from gateway.ops.access_log import PROBES, AccessLog, RequestRecord
from gateway.ops.metrics import Telemetry
from gateway.ops.tracing import Tracer
from gateway.process.fair_room import Tenant
from gateway.process.lifecycle import Lifecycle
from gateway.time_limits import TimeLimits

if TYPE_CHECKING:
    from gateway.keys import ApiKey
    from gateway.limits.base import Lease

_KEY = "yardstick.context"
_SANE_ID = re.compile(rb"[\w.:/+=@-]{1,128}", re.ASCII)
_SANE_NAME = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)
MAX_NAMES = 32


@dataclass(slots=True)
class RequestContext(RequestRecord):
    """State of the request in progress."""

    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Headers to add to the response, whatever its status."""
    key: ApiKey | None = None
    """The client's key, on a server with keys."""
    streams: bool = False
    """Whether the response is a stream of events."""
    lease: Lease | None = None
    """The requests, tokens and items of the key's limits that the request has taken so far; None if it has taken none."""
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Functions to call when the response is sent or abandoned."""
    limits: TimeLimits = field(default_factory=TimeLimits)

    @property
    def key_name(self) -> str | None:
        return None if self.key is None else self.key.name

    @property
    def tenant(self) -> Tenant:
        """Whom the request's share of room belongs to."""
        return Tenant() if self.key is None else Tenant(self.key.id, self.key.weight)

    def cut_off(self) -> GatewayError | None:
        """Return the error for the client if the current task was cancelled by a time limit or by the end of the grace period; the
        task calls this when it is cancelled. If so, the cancellation is undone, so that the task can send the error."""
        error = self.limits.error or (ShuttingDown() if self.lifecycle.ended else None)
        task = asyncio.current_task()
        if error is not None and task is not None:
            task.uncancel()
        return error

    @staticmethod
    def of(connection: ASGIConnection) -> RequestContext:  # type: ignore[type-arg]
        """Return the context of the request of ``connection``."""
        context: RequestContext = connection.scope[_KEY]  # type: ignore[literal-required]
        return context

    @staticmethod
    def in_scope(scope: Scope) -> RequestContext:
        """Return the context of the request of ``scope``."""
        context: RequestContext = scope[_KEY]  # type: ignore[literal-required]
        return context

    def failed(self, error: Exception) -> None:
        """Record an error that is sent to the client, as the response or within a response that has begun."""
        self.error = (error.code or error.type) if isinstance(error, GatewayError) else InternalError.code
        if isinstance(error, ShuttingDown):
            self.outcome = "shutdown"
        elif self.first_byte is not None:
            self.outcome = "error"

    def name_ignored(self, fields: list[str]) -> None:
        """Add a response header with the request fields that had no effect."""
        names = [name if _SANE_NAME.fullmatch(name) else "?" for name in fields[:MAX_NAMES]]
        if names:
            self.headers.append((b"x-yardstick-ignored", ", ".join(names).encode()))


async def answer_request(
    app: ASGIApp,
    telemetry: Telemetry,
    lifecycle: Lifecycle,
    log: AccessLog | None,
    tracer: Tracer | None,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Run ``app`` for one HTTP request, add ``x-request-id`` to its response, count it, log it and trace it."""
    given = Incoming.of(scope).headers.get(b"x-request-id", b"")
    trace = None if tracer is None else tracer.begin(scope["path"], Incoming.of(scope).headers)
    context = RequestContext(given if _SANE_ID.fullmatch(given) else new_id().encode(), lifecycle=lifecycle)
    scope[_KEY] = context  # type: ignore[literal-required]

    async def send_marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            context.status = message["status"]
            context.first_byte = time.perf_counter()
            context.streams = _is_stream(message["headers"])
            context.limits.response_begins(stream=context.streams)
            last = [(b"connection", b"close")] if lifecycle.draining else []
            message["headers"] = [*message["headers"], (b"x-request-id", context.id), *context.headers, *last]
        await send(message)

    counted = scope["path"] not in PROBES
    telemetry.in_flight += counted
    try:
        context.limits.read(Incoming.of(scope).headers)
        await app(scope, receive, send_marked)
    except InvalidRequest as error:
        context.failed(error)
        await _answer(error, send_marked)
    except asyncio.CancelledError:
        cut_off = context.cut_off() if context.first_byte is None else None
        if cut_off is None:
            context.outcome = "shutdown"
            raise
        context.failed(cut_off)
        await _answer(cut_off, send_marked)
    finally:
        context.limits.close()
        telemetry.in_flight -= counted
        for call in context.at_end:
            call()
        now = time.perf_counter()
        route = scope.get("path_template", "none")
        exemplar = None if trace is None else trace.exemplar
        model, first_byte = context.account.model, context.first_byte or now
        if context.account.adapter is not None:
            telemetry.adapter_used(model or "", context.account.adapter)
        if context.key is not None:
            telemetry.used(context.key.name, context.account)
        times = first_byte - context.began, now - context.began
        telemetry.answered(route, model, context.status, *times, exemplar, stream=context.streams)
        if context.broke:
            telemetry.broken.labels(model, context.error or context.outcome).inc()
        if log is not None:
            log.ended(context, route, now - context.began)
        if tracer is not None and trace is not None:
            tracer.exporter.put(trace.end(context, scope["method"], route))  # type: ignore[typeddict-item]


async def _answer(error: GatewayError, send: Send) -> None:
    """Send ``error`` as the response to a request without one."""
    body = msgspec.json.encode(error.body)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _is_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether these are the headers of a stream of events."""
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
