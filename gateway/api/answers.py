"""Streams of events and large answers.

A response begins with its first event, so an error before it is a response with its own status. If the first event takes longer
than ``keepalive_seconds``, the response begins with a comment. A further comment follows whenever nothing has been sent for that
time. An error after the beginning is sent as the last event, without ``[DONE]``. When the client leaves, all work for it is
cancelled, including the call to the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

import msgspec
from litestar import Response
from litestar.types import Receive, Scope, Send

from yardstick_llm.gateway.errors import ClientGone, GatewayError, InternalError
from yardstick_llm.gateway.http.connection import Cycle, Incoming
from yardstick_llm.gateway.http.context import AnyRequest, RequestContext
from yardstick_llm.gateway.process.event_loop import TimeSlice

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)
C = TypeVar("C")

_encoder = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients ignore: https://html.spec.whatwg.org/multipage/server-sent-events.html#authoring-notes."""


def sse(chunk: msgspec.Struct) -> bytes:
    """Encode one event."""
    return b"data: %b\n\n" % _encoder.encode(chunk)


class while_connected:
    """An async context manager that cancels its block when the client leaves, and raises :class:`ClientGone` from it. The body must
    have been read before. It starts no task, because every request enters it."""

    __slots__ = ("_incoming", "_left", "_owner")

    def __init__(self, scope: Scope) -> None:
        self._incoming = Incoming.of(scope)
        self._left = False
        self._owner: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> None:
        self._owner = asyncio.current_task()
        self._incoming.at_disconnect.append(self._leave)
        if (cycle := self._incoming.cycle()) is not None:
            cycle.flow.resume_reading()  # the end of a connection is not seen while reading is paused
        if self._incoming.left:
            asyncio.get_running_loop().call_soon(self._leave)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        owner, self._owner = self._owner, None
        self._incoming.at_disconnect.remove(self._leave)
        if self._left and kind is asyncio.CancelledError and owner is not None:
            owner.uncancel()
            raise ClientGone("The client left before the answer was ready.") from None

    def _leave(self) -> None:
        if self._owner is not None and not self._left:
            self._left = True
            self._owner.cancel()


class StreamHandle:
    """A way to write events without resuming the iterator of events, for a response that has begun. The iterator must have yielded
    all earlier events, and wait for news."""

    writer: _EventWriter | None = None
    """The response's connection; None before its beginning and after its end."""


class _OwnApp(Response[C]):
    """A response that sends itself: it is its own ASGI application."""

    def to_asgi_response(self, *_: Any, **__: Any) -> Any:
        """Return what the framework calls to send the response."""
        return self


class EventStream(_OwnApp[Any]):
    """A response of server-sent events."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        request: AnyRequest,
        keepalive_seconds: float,
        failure: Callable[[GatewayError], bytes] | None = None,
        handle: StreamHandle | None = None,
    ) -> None:
        """``events``: the iterator of encoded events. Before the first one, its exceptions reach the caller of the response. It is
        always closed when the response ends. ``failure``: returns the last event of a stream that breaks off; by default, that is
        the error's body. ``handle``: writes events without the iterator."""
        self.headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        self._events = events
        self._context = RequestContext.of(request)
        self._keepalive_seconds = keepalive_seconds
        self._failure = failure or (lambda error: sse(error.body))
        self._handle = handle or StreamHandle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send the head and all events, or those before the client leaves. Raises what happens before the beginning."""
        fields = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        writer = _EventWriter(send, self._keepalive_seconds, Incoming.of(scope).cycle(), fields)
        self._handle.writer = writer
        try:
            async with aclosing(self._events), while_connected(scope):
                try:
                    await self._send_events(writer)
                finally:
                    self._handle.writer = None
                    writer.stop()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:
            if not writer.begun:
                raise
            self._context.outcome = "client_gone"

    async def _send_events(self, writer: _EventWriter) -> None:
        """Send the events; an error becomes the last event."""
        try:
            async for event in self._events:
                if writer.writable:
                    writer.write(event)
                else:
                    await writer.send(event)
        except GatewayError as error:
            await self._send_error(writer, error)
        except asyncio.CancelledError:
            cut_off = self._context.cut_off() if writer.begun else None
            if cut_off is None:
                raise
            await self._send_error(writer, cut_off)
        except Exception:
            if not writer.begun:
                raise
            logger.exception("a stream failed")
            await self._send_error(writer, InternalError("An internal error occurred."))

    async def _send_error(self, writer: _EventWriter, error: GatewayError) -> None:
        if not writer.begun:
            raise error
        self._context.failed(error)
        await writer.send(self._failure(error))


class _EventWriter:
    """Sends events, and a comment whenever nothing was sent for ``seconds``. The first of them begins the response.

    One timer compares the time of the last event, so that an event starts no timer. While an event waits for the client to read, no
    comment is sent. At most one comment waits for the client.
    """

    def __init__(self, send: Send, seconds: float, cycle: Cycle | None, fields: Sequence[tuple[bytes, bytes]]) -> None:
        """``cycle``: the server's side of the response; None: it is not known. ``fields``: the response's headers."""
        self.begun = False
        """Whether the response has begun."""
        self._send = send
        self._fields = fields
        self.cycle = cycle
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._sent = self._loop.time()
        self._sending = False
        self._comment: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(seconds, self._look)

    @property
    def writable(self) -> bool:
        """Whether :meth:`write` can be called now; otherwise it takes :meth:`send`."""
        return self.cycle is not None and self.cycle.writable

    def write(self, event: bytes) -> None:
        """Pass bytes of the body to the connection. Only while :attr:`writable`."""
        assert self.cycle is not None
        self.cycle.write(event)
        self._sent = self._loop.time()

    async def send(self, event: bytes) -> None:
        """Send bytes of the body."""
        self._sending = True
        if self._comment is not None and not self._comment.done():  # it may be about to begin the response
            await asyncio.wait({self._comment})
        await self._send_part(event)
        self._sending = False

    def stop(self) -> None:
        """Stop sending comments."""
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    def _look(self) -> None:
        due, now = self._sent + self._seconds, self._loop.time()
        if due <= now:
            due = now + self._seconds
            if not self._sending and (self._comment is None or self._comment.done()):
                self._comment = asyncio.create_task(self._send_part(KEEP_ALIVE))
        self._timer = self._loop.call_at(due, self._look)

    async def _send_part(self, body: bytes) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(self._fields)})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self._sent = self._loop.time()


LARGE_NUMBERS = 2000
"""Numbers of an answer above which it is built and encoded in slices; these many take about a millisecond. A struct takes as much
time as four of them."""
PART_BYTES = 1 << 16
"""Bytes of a large response after which a new part begins; each part is sent separately."""


class JsonParts(_OwnApp[C]):
    """A response with JSON in parts, which are sent one after another.

    It takes a fifth of the function calls of the framework's own response. The framework's stream waits for the client to leave
    while it sends, and then sometimes closes the connection.
    """

    def __init__(self, parts: Sequence[bytes | memoryview], headers: Mapping[str, str] | None = None, *, status: int = 200) -> None:
        self.headers = dict(headers or {})
        self._parts = parts
        self._status = status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send the response."""
        fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % sum(map(len, self._parts)))]
        fields += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self._status, "headers": fields})
        for part in self._parts[:-1]:
            await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
            await asyncio.sleep(0)  # so that the event loop serves others in between
        await send({"type": "http.response.body", "body": bytes(self._parts[-1]), "more_body": False})


class JsonResponse(JsonParts[C]):
    """A response with ``content`` as JSON."""

    def __init__(self, content: C, headers: Mapping[str, str] | None = None, *, status: int = 200) -> None:
        super().__init__([_encoder.encode(content)], headers, status=status)


async def with_rows(
    answer: T, name: str, rows: Iterable[object], *, numbers: int, headers: Mapping[str, str] | None = None
) -> Response[Any]:
    """Return a response with ``rows`` in place of the empty list in the field ``name`` of ``answer``. ``numbers``: as for
    :data:`LARGE_NUMBERS`."""
    if numbers <= LARGE_NUMBERS:
        return JsonResponse(msgspec.structs.replace(answer, **{name: list(rows)}), headers)
    return JsonParts(await _filled(answer, {name: rows}), headers)


async def with_lists(answer: msgspec.Struct, lists: Mapping[str, Iterable[object]], *, headers: Mapping[str, str]) -> Response[Any]:
    """Return a response with each of ``lists`` in place of the empty list of that name in ``answer``, encoded in slices."""
    return JsonParts(await _filled(answer, lists), headers)


async def event_with_rows(answer: msgspec.Struct, name: str, rows: Iterable[object]) -> bytes:
    """Return ``answer`` as a server-sent event, with ``rows`` in place of the empty list in its field ``name``."""
    return b"data: %b\n\n" % b"".join(await _filled(answer, {name: rows}))


async def _filled(answer: msgspec.Struct, lists: Mapping[str, Iterable[object]]) -> list[bytes]:
    parts, rest = [], _encoder.encode(answer)
    for _, name in sorted((rest.index(b'"%b":[]' % name.encode()), name) for name in lists):
        before, rest = rest.split(b'"%b":[]' % name.encode(), 1)
        parts += await _parts(before + b'"%b":[' % name.encode(), lists[name], b"]")
    return [*parts, rest]


async def listed(rows: Iterable[object], *, numbers: int, headers: Mapping[str, str] | None = None) -> Response[Any]:
    """Return a response that is a list of ``rows``; see :func:`with_rows`."""
    if numbers <= LARGE_NUMBERS:
        return JsonResponse(list(rows), headers)
    return JsonParts(await _parts(b"[", rows, b"]"), headers)


async def _parts(before: bytes, rows: Iterable[object], after: bytes) -> list[bytes]:
    """Encode ``rows`` in slices."""
    parts, part, time_slice = [], bytearray(before), TimeSlice()
    separator = b""
    for row in rows:
        part += separator + _encoder.encode(row)
        separator = b","
        if len(part) > PART_BYTES:
            parts.append(bytes(part))
            part.clear()
        if time_slice.over:
            await time_slice.yield_to_loop()
    return [*parts, bytes(part) + after]


def encoded(body: bytes | memoryview) -> Response[Any]:
    """Return a response with ``body``, which is JSON already. Its parts are views, because copying megabytes takes milliseconds."""
    view = memoryview(body)
    return JsonParts([view[start : start + PART_BYTES] for start in range(0, len(view), PART_BYTES)])
