"""The state of one request from its first byte to the end of its response: id, key, extra headers, costs, times."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from litestar import Request
from litestar.connection import ASGIConnection
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from yardstick_llm.gateway.errors import DeadlineExceeded, GatewayError, InternalError, InvalidRequest, ShuttingDown
from yardstick_llm.gateway.http.connection import Incoming
from yardstick_llm.gateway.ops.access_log import PROBES, AccessLog, RequestRecord
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.ops.tracing import Tracer
from yardstick_llm.gateway.process.bounds import Tenant
from yardstick_llm.gateway.process.signals import Lifecycle
from yardstick_llm.gateway.schemas.common import new_id
from yardstick_llm.gateway.schemas.parameters import MAX_SECONDS

if TYPE_CHECKING:
    from yardstick_llm.gateway.keys import ApiKey
    from yardstick_llm.gateway.limits.limiter import Lease

AnyRequest = Request[Any, Any, Any]
"""A request. Its user and its state are not typed: the context below has them."""

_KEY = "yardstick.context"
_SANE_ID = re.compile(rb"[\w.:/+=@-]{1,128}", re.ASCII)
_SANE_NAME = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)
MAX_NAMES = 32
TIMEOUT_HEADER = b"x-yardstick-timeout"
SDK_HEADERS = b"x-stainless-read-timeout", b"x-stainless-timeout"
"""Headers of OpenAI's SDKs for Python and for JavaScript, in seconds."""
LEAST_SECONDS = 0.001
"""Shortest timer: for a shorter time, uvloop returns a handle that does not know when it runs."""
LATER_SECONDS = 1.0
"""How much later than a client's limit an engine's deadline is, so that the gateway ends the request before the engine fails it."""


class TimeLimits:
    """The time limits of one request, counted from its beginning. When one passes, the client no longer waits, so the request's
    task is cancelled.

    ``x-yardstick-timeout`` and the field ``timeout`` of a body limit the time until the end of the answer, streams included.
    OpenAI's SDKs name the time after which they give up in a header of their own. That time begins anew with every byte, so it only
    limits the wait for the beginning of a stream.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._task: asyncio.Task[Any] | None = None
        self._beginning: asyncio.TimerHandle | None = None
        self._end: asyncio.TimerHandle | None = None
        self._expired: float | None = None

    def read(self, headers: Mapping[bytes, bytes]) -> None:
        """Set the limits that ``headers`` name. The calling task is the one that is cancelled. Raises :class:`InvalidRequest` for a
        wrong value of our own header."""
        self._task = asyncio.current_task()
        _current.set(self)
        for name in SDK_HEADERS:
            if (value := headers.get(name)) and (seconds := _seconds(value)) is not None:
                self._beginning = self._timer(seconds)
                break
        if value := headers.get(TIMEOUT_HEADER):
            if (seconds := _seconds(value)) is None:
                raise InvalidRequest(f"{TIMEOUT_HEADER.decode()} must be a number of seconds above 0, and {MAX_SECONDS:g} at most.")
            self.end_within(seconds)

    def end_within(self, seconds: float) -> None:
        """Limit the time until the end of the answer. The last limit that is set holds."""
        if self._end is not None:
            self._end.cancel()
        self._end = self._timer(seconds)

    def response_begins(self, *, stream: bool) -> None:
        """Drop the limits that the response meets: all, unless it is a stream."""
        if self._beginning is not None:
            self._beginning.cancel()
        if self._end is not None and not stream:
            self._end.cancel()

    def close(self) -> None:
        """Drop all limits."""
        self.response_begins(stream=False)

    @property
    def remaining(self) -> float | None:
        """Seconds until the first of the limits passes; None without a limit."""
        ends = [timer.when() for timer in (self._beginning, self._end) if timer is not None and not timer.cancelled()]
        return max(0.0, min(ends) - asyncio.get_running_loop().time()) if ends else None

    @property
    def error(self) -> DeadlineExceeded | None:
        """The error for the client if a limit has passed."""
        if self._expired is None:
            return None
        return DeadlineExceeded(
            f"The request was not answered within {self._expired:g} s, its time limit; ask for less, or allow more."
        )

    def _timer(self, seconds: float) -> asyncio.TimerHandle:
        rest = self._began + seconds - time.perf_counter()
        return asyncio.get_running_loop().call_later(max(LEAST_SECONDS, rest), self._expire, seconds)

    def _expire(self, seconds: float) -> None:
        self._expired = seconds
        if self._task is not None:
            self._task.cancel()


_current: ContextVar[TimeLimits | None] = ContextVar("time_limits", default=None)
"""The limits of the request that the current task works for."""


def engine_deadline(seconds: float) -> float:
    """Seconds after which an engine need not begin a message of the current request: ``seconds``, or less if the client's limit
    passes before."""
    limits = _current.get()
    remaining = None if limits is None else limits.remaining
    return seconds if remaining is None else min(seconds, remaining + LATER_SECONDS)


def _seconds(value: bytes) -> float | None:
    """Return the number in a header; None if it is no valid limit."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0 < seconds <= MAX_SECONDS else None


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
        return RequestContext.in_scope(connection.scope)

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


class CachePolicy(NamedTuple):
    """Whether one request reads and writes caches, as its header ``Cache-Control`` allows."""

    read: bool = True
    """Use results from the result cache and from other requests in flight."""
    write: bool = True
    """Store results in the result cache, and the prompt in engines' prefix caches."""

    @classmethod
    def of(cls, connection: ASGIConnection) -> CachePolicy:  # type: ignore[type-arg]
        """Return the policy of a request: ``no-cache`` computes and stores new results; ``no-store`` neither reads nor stores.
        Other directives have no effect."""
        given = Incoming.of(connection.scope).headers.get(b"cache-control")
        if given is None:
            return _DEFAULT
        directives = {part.strip().lower() for part in given.split(b",")}
        stores = b"no-store" not in directives
        return cls(read=stores and b"no-cache" not in directives, write=stores)


_DEFAULT = CachePolicy()


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
        await send_error(error, send_marked)
    except asyncio.CancelledError:
        cut_off = context.cut_off() if context.first_byte is None else None
        if cut_off is None:
            context.outcome = "shutdown"
            raise
        context.failed(cut_off)
        await send_error(cut_off, send_marked)
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


async def send_error(error: GatewayError, send: Send) -> None:
    """Send ``error`` as the response to a request without one."""
    body = msgspec.json.encode(error.body)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _is_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether these are the headers of a stream of events."""
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
