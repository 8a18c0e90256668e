"""One HTTP/1.1 connection: uvicorn's protocol, with bounds on everything that a client may send, and on the time it may take.

Differences from uvicorn, all of which docs/http.md describes:

- Requests that are not HTTP, too large or too slow are answered in OpenAI's error shape.
- ``Upgrade`` is ignored, as RFC 9110 7.8 allows, and the body of such a request is read.
- One request at a time: bytes after a request are dropped until its response is complete, and the connection is then closed.
- A connection is closed in two steps where the client may still be sending, so that a TCP reset does not destroy the answer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from functools import partial
from math import inf
from typing import Any
from urllib.parse import unquote

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.edge.body import ARRIVING
from gateway.edge.connections import Connections
from gateway.edge.transport import GatheringTransport
from gateway.errors import GatewayError, HeadersTooLarge, InvalidRequest, MethodNotAllowed, Overloaded, RequestTimeout
from gateway.exchange import new_id
from gateway.settings import Settings
from gateway.telemetry import Telemetry

LINGER_SECONDS = 1.0
"""Time that a client has to read an answer that was sent before its request was complete."""
MAX_DROPPED = 64 << 20
"""Bytes that are read and dropped before a connection is aborted."""
SLICE = 16 * 1024
"""Bytes of a chunked body that are parsed in one turn of the event loop: at most 2,700 chunks, about a millisecond."""
CHUNK_OVERHEAD = 12
"""Bytes around the data of one chunk that are normal."""
MAX_OVERHEAD = 64 * 1024
"""Further bytes of a chunked body that are not data: chunk extensions and trailers."""
_HOP_BY_HOP = (b"upgrade", b"http2-settings", b"connection")
_NOT_HTTP = "This is not a valid HTTP/1.1 request: {}. Check the client, or whatever stands between it and this server."


class _Phase(Enum):
    WAITING = auto()
    """No byte of the next request has arrived."""
    HEAD = auto()
    """The request line or a header is incomplete."""
    WORKING = auto()
    """A request is in progress. Its body may be incomplete."""
    CLOSING = auto()
    """Nothing more is answered; what was written is still being sent."""


_WAITING, _HEAD, _WORKING, _CLOSING = _Phase
"""As globals: looking up a member of an enumeration costs more than comparing it (Python 3.11)."""


class _Pipelined(Exception):
    """A request began before the response to the one before it was complete."""


def protocol_factory(settings: Settings, telemetry: Telemetry) -> Callable[..., Protocol]:
    """Makes the protocols of one server; for ``uvicorn.Config(http=…)``."""
    return partial(Protocol, Connections(settings, telemetry))


class Cycle(RequestResponseCycle):
    """One request and its response."""

    failure: GatewayError | None = None
    """Why the rest of the body will not be read."""

    def fail(self, error: GatewayError) -> None:
        """Raise ``error`` from ``receive``, and close after the response."""
        self.failure = error
        self.keep_alive = False
        self.message_event.set()

    def receive(self) -> Coroutine[Any, Any, Any]:
        """The ASGI ``receive``. Raises :class:`InvalidRequest` where the body is not valid HTTP, and :class:`RequestTimeout`."""
        return super().receive() if self.failure is None else self._raise(self.failure)

    def send(self, message: Any) -> Coroutine[Any, Any, None]:
        """The ASGI ``send``."""
        if self.more_body and not self.response_started:
            self.keep_alive = False  # the rest of the body will not be read
        return super().send(message)

    async def _raise(self, error: GatewayError) -> Any:
        raise error


class Protocol(HttpToolsProtocol):
    """One connection."""

    cycle: Cycle
    transport: GatheringTransport  # type: ignore[assignment]

    def __init__(self, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._connections = connections
        self._settings = settings = connections.settings
        self._phase: _Phase = _WAITING
        self._deadline = self.loop.time() + settings.header_seconds
        """When the present phase must have ended, in the event loop's time."""
        self._write_deadline = inf
        """When the client must have read more, while too much waits to be sent."""
        self._unwritten = 0
        """Bytes that waited to be sent at the last progress."""
        self._room = settings.max_header_bytes
        """Bytes that may be parsed without looking at them in pieces. Before the head is complete, the rest of its bound."""
        self._hosts = 0
        self._body_began = 0.0
        self._body_bytes = 0
        self._chunked = False
        self._overhead = 0
        """Bytes of the chunked body beyond its data and the normal overhead of its chunks."""
        self._backlog = memoryview(b"")
        """Bytes of a chunked body that have not been parsed. Nothing is read meanwhile, so this is at most one read's worth."""
        self._dropping = False
        """Whatever arrives is dropped; only the end of the connection matters."""
        self._dropped = 0

    # --- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(GatheringTransport(transport, self.loop, self._close))  # type: ignore[arg-type]
        if not self._connections.admit(self, self.loop):
            if self._connections.can_answer:
                self._refuse(Overloaded("This server has too many open connections; try again soon.", retry_after=1), "connections")
            else:
                self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended."""
        self._connections.forget(self)
        self._deadline = self._write_deadline = inf
        self._dropping = True
        super().connection_lost(exc)

    def check_deadlines(self, now: float) -> None:
        """Called by the registry a few times a second."""
        if now >= self._write_deadline:
            self._check_writing()
        elif now < self._deadline:
            return
        elif self._phase is _HEAD:
            limit = self._settings.header_seconds
            self._refuse(RequestTimeout(f"The request's headers did not arrive within {limit:g} s."), "header_timeout")
        elif self._phase is _WAITING:
            self.transport.close()
        elif self._phase is _WORKING:
            self._check_body(now)
        elif self.transport.get_write_buffer_size():
            self._deadline = now + LINGER_SECONDS
        else:
            self.transport.abort()

    def _check_body(self, now: float) -> None:
        seconds, rate = self._settings.body_seconds, self._settings.body_bytes_per_second
        self._deadline = self._body_began + seconds + self._body_bytes / rate
        if now >= self._deadline:
            words = f"The request's body did not arrive within {seconds:g} s, or came slower than {rate} bytes/s after that."
            self._body_failed(RequestTimeout(words), "body_timeout")

    def evict(self) -> None:
        """Close, to make room for another connection."""
        self.transport.abort()

    def pause_writing(self) -> None:
        """Too much waits to be sent: the client must read some of it in time."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """The client has read enough."""
        super().resume_writing()
        if self._phase is not _CLOSING:  # while closing, everything must be read
            self._write_deadline = inf

    def _await_reader(self) -> None:
        self._unwritten = self.transport.get_write_buffer_size()
        self._write_deadline = self.loop.time() + self._settings.write_seconds

    def _check_writing(self) -> None:
        """Abort unless the client has read something since the last check. What works for it is cancelled by the disconnect."""
        unwritten = self.transport.get_write_buffer_size()
        if unwritten and unwritten >= self._unwritten:
            self._connections.telemetry.rejected("write_timeout")
            self.transport.abort()
        elif unwritten:
            self._await_reader()
        else:
            self._write_deadline = inf

    def _close(self) -> None:
        """Close once everything is sent; where the client may still be sending, after it has had time to read the answer."""
        inner = self.transport.inner
        lingers = self._phase is not _CLOSING and (self._dropping or (self.cycle is not None and self.cycle.more_body))
        self._phase = _CLOSING
        self._dropping = True
        self._connections.works(self)
        if inner.is_closing():
            return
        self._await_reader()
        if lingers:
            self._deadline = self.loop.time() + LINGER_SECONDS
            inner.write_eof()
            self.transport.release()
            self.flow.resume_reading()
        else:
            self._deadline = inf
            inner.close()

    def _refuse(self, error: GatewayError, reason: str) -> None:
        """Answer ``error`` without the application, and close."""
        self._connections.telemetry.rejected(reason)
        body = msgspec.json.encode(error.body)
        fields = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": new_id(),
            "connection": "close",
            **error.headers,
        }
        lines = [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
        lines += [f"{name}: {value}\r\n".encode() for name, value in fields.items()]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        self._dropping = True
        self.transport.close()

    # --- bytes in

    def data_received(self, data: bytes) -> None:
        """Bytes arrived."""
        if self._dropping:
            self._drop(len(data))
            return
        if len(data) > self._room:
            self._feed_carefully(data)
        else:
            self._room -= len(data)
            self._feed(data)
        if self._phase is _WAITING:
            self._phase = _HEAD
            self._deadline = self.loop.time() + self._settings.header_seconds

    def _drop(self, size: int) -> None:
        self._dropped += size
        if self._dropped > MAX_DROPPED:
            self.transport.abort()

    def _feed(self, data: bytes | memoryview) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(bytes(data[upgrade.args[0] :]))
        except httptools.HttpParserError as error:
            self._parse_failed(error)

    def _feed_carefully(self, data: bytes) -> None:
        """Feed ``data`` of which more than is harmless may be part of the head, or of a chunked body."""
        if self._phase is _WORKING:
            self._backlog = memoryview(data)
            self._feed_slice()
            return
        head, rest = data[: self._room], data[self._room :]
        self._room = 0
        if head:
            self._feed(head)
        if self._dropping:
            return
        if self._phase is _WORKING:
            if rest:
                self.data_received(rest)
        else:
            limit = self._settings.max_header_bytes
            self._refuse(HeadersTooLarge(f"Request line and headers are longer than {limit} bytes; shorten them."), "headers")

    def _feed_slice(self) -> None:
        """Parse one slice of a chunked body; the next one follows in the event loop's next turn."""
        if not self._dropping:  # it may have ended since this was called
            part, self._backlog = self._backlog[:SLICE], self._backlog[SLICE:]
            self._overhead += len(part)
            self._feed(part)
        if self._overhead > MAX_OVERHEAD and not self._dropping:
            self._body_failed(InvalidRequest("The chunked body has long extensions or trailers; send plain chunks."), "parse")
        if self._backlog and not self._dropping:
            self.transport.hold()
            self.loop.call_soon(self._feed_slice)
        else:
            self._backlog = memoryview(b"")
            self.transport.release()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its offer to upgrade. The parser skips the bodies of requests that have one."""
        if self.parser.get_method() == b"CONNECT":
            self._refuse(MethodNotAllowed("This server is no proxy; CONNECT is not supported."), "parse")
            return
        tokens = [part.strip() for name, value in self.headers if name == b"connection" for part in value.lower().split(b",")]
        kept = b", ".join(token for token in tokens if token not in _HOP_BY_HOP)
        headers = [(name, value) for name, value in self.headers if name not in _HOP_BY_HOP]
        headers += [(b"connection", kept)] if kept else []
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(b"".join([line, *(b"%b: %b\r\n" % header for header in headers), b"\r\n"]))
        if rest and not self._dropping:
            self.data_received(rest)

    def _parse_failed(self, error: httptools.HttpParserError) -> None:
        cause = error.__context__
        refusal = cause if isinstance(cause, GatewayError) else InvalidRequest(_NOT_HTTP.format(_plain(error)))
        if self._phase is not _WORKING:
            self._refuse(refusal, "headers" if refusal.status == HeadersTooLarge.status else "parse")
        elif self.cycle.more_body and not isinstance(cause, _Pipelined):
            self._body_failed(refusal, "parse")
        else:  # the next request came too early
            self._dropping = True
            self.cycle.keep_alive = False

    def _body_failed(self, error: GatewayError, reason: str) -> None:
        """The application gets ``error`` in place of the rest of the body."""
        self._connections.telemetry.rejected(reason)
        self._deadline = inf
        self._dropping = True
        self.cycle.fail(error)

    # --- the parser's events

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._phase is _WORKING:
            raise _Pipelined
        super().on_message_begin()
        self._hosts = 0
        self._chunked = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is complete, or a trailer."""
        name = name.lower()
        if name == b"host":
            self._hosts += 1
        elif name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"
        elif name == b"transfer-encoding":
            self._chunked = True
        if len(self.headers) >= self._settings.max_headers:
            raise HeadersTooLarge(f"The request has more than {self._settings.max_headers} headers; send fewer.")
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is complete: start the application."""
        if self.parser.should_upgrade():
            return  # _ignore_upgrade parses it again
        version = self.parser.get_http_version()
        if version == "1.0":
            self.scope["http_version"] = version
        elif version != "1.1":
            raise InvalidRequest("Only HTTP/1.1 and HTTP/1.0 are spoken here.")
        if self._hosts != 1 and (self._hosts or version == "1.1"):
            raise InvalidRequest("A request needs exactly one Host header.")
        self._describe(self.parser.get_method())
        self._phase = _WORKING
        self._body_began = self.loop.time()
        self._body_bytes = 0
        self._deadline = self._body_began + self._settings.body_seconds
        self._room = -1 if self._chunked else sys.maxsize
        self._overhead = 0
        self.headers = []  # trailers are counted here, apart from the headers
        self._connections.works(self)
        self.cycle = Cycle(
            scope=self.scope,
            transport=self.transport,  # type: ignore[arg-type]
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version == "1.1" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self.scope[ARRIVING] = self.cycle  # type: ignore[literal-required]
        self._start_asgi_task(self.cycle, self.app)

    def _describe(self, method: bytes) -> None:
        """Complete the ASGI scope."""
        scope = self.scope
        url = httptools.parse_url(self.url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        scope["method"] = method.decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = raw_path
        scope["query_string"] = url.query or b""

    def on_chunk_header(self) -> None:
        """A chunk begins."""
        self._overhead -= CHUNK_OVERHEAD

    def on_body(self, body: bytes) -> None:
        """A part of the body arrived."""
        cycle = self.cycle
        if cycle.response_complete:
            return
        self._overhead -= len(body)
        self._body_bytes += len(body)
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self._phase is _WORKING and not self.cycle.response_complete:
            self._deadline = inf
            self.cycle.more_body = False
            self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        """The response is written: wait for the next request."""
        self.server_state.total_requests += 1
        if self._phase is _CLOSING or self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._phase = _WAITING
        self._deadline = self.loop.time() + self._settings.idle_seconds
        self._room = self._settings.max_header_bytes
        self._connections.waits(self)


def _plain(error: httptools.HttpParserError) -> str:
    """The parser's words for what is wrong; they hold nothing that the client sent."""
    words = str(error)
    return words[:1].lower() + words[1:] if words.isprintable() and "callback" not in words.lower() else "the URL cannot be read"
