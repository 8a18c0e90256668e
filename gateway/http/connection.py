"""One HTTP/1.1 connection: uvicorn's protocol with bounds on the size of all input and on the time that it takes.

Differences from uvicorn, all of which docs/limits.md describes:

- Requests that are not HTTP, too large or too slow get a response in OpenAI's error format.
- ``Upgrade`` is ignored, as RFC 9110 7.8 allows, and the body of such a request is read: Java's ``HttpClient`` sends it.
- One request at a time: bytes after a request are dropped until its response is complete, and the connection is then closed.
- A connection is closed in two steps if the client may still be sending, so that a TCP reset does not destroy the response.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from math import inf
from typing import Any
from urllib.parse import unquote

import httptools
import msgspec
from litestar.types import Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from yardstick_llm.gateway.errors import GatewayError, HeadersTooLarge, InvalidRequest, MethodNotAllowed, Overloaded, RequestTimeout
from yardstick_llm.gateway.ops.access_log import AccessLog
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.schemas.common import new_id
from yardstick_llm.gateway.settings import Settings

INCOMING = "yardstick.incoming"
"""Key of the :class:`Incoming` in an ASGI scope."""


class Incoming:
    """Headers and arrival state of a request. Scopes refer to this object and not to the :class:`Cycle`, which refers to the scope:
    a reference cycle would keep bodies in memory until the next garbage collection."""

    __slots__ = ("at_disconnect", "complete", "cycle", "headers", "left")

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.headers = dict(headers)
        """Headers by lower-case name; the values of repeated headers are joined by commas."""
        if len(self.headers) != len(headers):
            self.headers = _joined(headers)
        self.complete = False
        """Whether the whole body has arrived."""
        self.cycle: Callable[[], Cycle | None] = _none
        """Weak reference to the cycle."""
        self.left = False
        """Whether the connection has ended."""
        self.at_disconnect: list[Callable[[], None]] = []
        """Functions to call when the connection ends."""

    def disconnected(self) -> None:
        """Record the end of the connection."""
        self.left = True
        for call in list(self.at_disconnect):
            call()

    @staticmethod
    def of(scope: Scope) -> Incoming:
        """Return the request of ``scope``. Every scope of this protocol has one."""
        incoming: Incoming = scope[INCOMING]  # type: ignore[literal-required]
        return incoming


class LingeringTransport:
    """A transport whose :meth:`close` calls a function instead, which lets the client read the response first."""

    def __init__(self, inner: asyncio.Transport, on_close: Callable[[], None]) -> None:
        self.inner = inner
        self.close = on_close

    def write(self, data: bytes) -> None:
        """Write, unless the connection is about to close."""
        if not self.inner.is_closing():
            self.inner.write(data)

    def pause_reading(self) -> None:
        """Pause reading, unless the connection is about to close."""
        if not self.inner.is_closing():
            self.inner.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading, unless the connection is about to close."""
        if not self.inner.is_closing():
            self.inner.resume_reading()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Cycle(RequestResponseCycle):
    """uvicorn's cycle, extended with failures of the body. After a failure every ``receive`` raises it."""

    failure: GatewayError | None = None
    """Reason why the rest of the body is not read."""

    def fail(self, error: GatewayError) -> None:
        """Raise ``error`` from ``receive``, and close after the response."""
        self.failure = error
        self.keep_alive = False
        self.message_event.set()

    @property
    def writable(self) -> bool:
        """Whether :meth:`write` can be called: not before the response begins, for a response without chunks, and while the client
        reads too slowly."""
        return bool(self.response_started and self.chunked_encoding) and not (self.flow.write_paused or self.disconnected)

    def write(self, data: bytes) -> None:
        """Write a part of the body without the layers between ``send`` and the connection. Only while :attr:`writable`."""
        if data:  # an empty chunk would end the body
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def receive(self) -> Coroutine[Any, Any, Any]:
        """The ASGI ``receive``. Raises :class:`InvalidRequest` if the body is not valid HTTP, and :class:`RequestTimeout`."""
        return RequestResponseCycle.receive(self) if self.failure is None else self._raise(self.failure)

    async def _raise(self, error: GatewayError) -> Any:
        raise error


def _none() -> None:
    return None


def _joined(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    joined: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        joined.setdefault(name, []).append(value)
    return {name: b", ".join(values) for name, values in joined.items()}


SWEEP_SECONDS = 0.25
"""Interval between checks of all deadlines. One timer serves all connections: a timer for each costs more than the check."""
REFUSED_AT_ONCE = 256
"""Most connections beyond the limit that are answered 429 at a time. Further ones are closed without an answer."""


class Connections:
    """The open connections, bounded. A new connection beyond ``max_connections`` replaces the one that has been idle longest; if
    none is idle, the new one is refused."""

    def __init__(self, settings: Settings, telemetry: Telemetry, log: AccessLog | None) -> None:
        """``log``: log of requests that are answered without the application."""
        self.settings = settings
        self.telemetry = telemetry
        self.log = log
        self.open: set[BoundedConnection] = set()
        self._waiting: OrderedDict[BoundedConnection, None] = OrderedDict()
        """Connections without a request in progress, the longest idle first."""
        self._sweeping = False
        telemetry.open_connections.set_function(lambda: len(self.open))

    @property
    def can_answer(self) -> bool:
        """Whether one more refused connection may stay open to receive its answer."""
        return len(self.open) <= self.settings.max_connections + REFUSED_AT_ONCE

    def admit(self, connection: BoundedConnection, loop: asyncio.AbstractEventLoop) -> bool:
        """Count a new connection. Returns False if there is no room and the caller should refuse it."""
        self.open.add(connection)
        if not self._sweeping:
            self._sweeping = True
            loop.call_later(SWEEP_SECONDS, self._sweep, loop)
        if len(self.open) > self.settings.max_connections and not self._evict_one():
            return False
        self._waiting[connection] = None
        return True

    def forget(self, connection: BoundedConnection) -> None:
        """Remove a closed connection."""
        self.open.discard(connection)
        self._waiting.pop(connection, None)

    def works(self, connection: BoundedConnection) -> None:
        """Mark a connection as busy, because a request arrived; it is not evicted while busy."""
        self._waiting.pop(connection, None)

    def waits(self, connection: BoundedConnection) -> None:
        """Mark a connection as idle."""
        self._waiting[connection] = None

    def _evict_one(self) -> bool:
        if not self._waiting:
            return False
        oldest, _ = self._waiting.popitem(last=False)
        self.open.discard(oldest)
        oldest.transport.abort()
        self.telemetry.rejected.labels("evicted").inc()
        return True

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in list(self.open):
            connection.check_deadlines(now)
        self._sweeping = bool(self.open)
        if self._sweeping:
            loop.call_later(SWEEP_SECONDS, self._sweep, loop)


HEADER_SECONDS = 10.0
"""Longest time for the request line and headers, from their first byte, before the answer is 408. On a new connection, also the
longest time for the first byte, before the connection is closed."""
BODY_SECONDS = 30.0
"""Time for a body, in addition to the time for its bytes at ``BODY_BYTES_PER_SECOND``; after that the answer is 408."""
BODY_BYTES_PER_SECOND = 16 << 10
"""Lowest average rate of a body, apart from the first ``BODY_SECONDS``."""
WRITE_SECONDS = 30.0
"""Time in which a client must read some pending output; after that its connection is closed and its work is cancelled."""
LINGER_SECONDS = 1.0
"""Time that a client has to read a response that was sent before its request was complete."""
MAX_DROPPED = 64 << 20
"""Bytes that a connection reads and drops before it is aborted."""
MAX_HEADER_BYTES = 64 << 10
"""Largest request line and headers together, in bytes; larger ones are answered 431."""
MAX_HEADERS = 128
"""Most headers of a request; more are answered 431."""
CHUNK_OVERHEAD = 12
"""Bytes of framing that are allowed for each chunk."""
MAX_OVERHEAD = 64 * 1024
"""Bytes of a chunked body that are allowed beyond data and normal framing: chunk extensions and trailers."""
_OF_UPGRADES = (b"upgrade", b"http2-settings", b"connection")
_NOT_HTTP = "This is not a valid HTTP/1.1 request: {}. Check the client and any proxy between it and this server."


class Phase(Enum):
    """Phases of a connection."""

    WAITING = auto()
    """Waits for the first byte of the next request."""
    HEAD = auto()
    """Waits for the rest of the request line and headers."""
    WORKING = auto()
    """Waits for the rest of the body, or for the end of the response."""
    CLOSING = auto()
    """Waits for the client to read what was written. No further request is answered."""


# These are globals because looking up an enumeration member costs more than comparing it (Python 3.11).
WAITING, HEAD, WORKING, CLOSING = Phase


class _Pipelined(Exception):
    """A request began before the response to the previous one was complete."""


class BoundedConnection(HttpToolsProtocol):
    """One connection: parses bytes and starts requests, with a deadline for every phase."""

    cycle: Cycle
    transport: LingeringTransport  # type: ignore[assignment]

    def __init__(self, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._connections = connections
        self._settings = connections.settings
        self._phase: Phase = WAITING
        self._head_began = self.loop.time()
        """Time of the connection, or of the first byte of its latest request, on the event loop's clock."""
        self._deadline = self._head_began + HEADER_SECONDS
        """End of the current phase, on the event loop's clock."""
        self._write_deadline = inf
        """Time by which the client must have read more, while the write buffer is full; infinite otherwise."""
        self._unwritten = 0
        """Size of the write buffer at the last progress, in bytes."""
        self._body_began = 0.0
        self._body_bytes = 0
        self._keep_alive = True
        """Whether the connection stays open after a request that arrives completely."""
        self._dropping = False
        """Whether input is dropped, because the connection is about to close."""
        self._dropped = 0
        self._room = MAX_HEADER_BYTES
        """Bytes that may be parsed in one piece. Before the head is complete, this is the rest of its size limit."""
        self._incoming = Incoming([])
        self._overhead = 0
        """Bytes of the chunked body beyond its data and the normal framing of its chunks."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start a new connection, or refuse it if there are too many."""
        super().connection_made(LingeringTransport(transport, self._close))  # type: ignore[arg-type]
        if not self._connections.admit(self, self.loop):
            if self._connections.can_answer:
                self._refuse(Overloaded("This server has too many open connections; try again soon.", retry_after=1), "connections")
            else:
                self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request in progress, and release the resources of the connection."""
        self._connections.forget(self)
        self._deadline = self._write_deadline = inf
        self._dropping = True
        super().connection_lost(exc)
        self._incoming.disconnected()

    def check_deadlines(self, now: float) -> None:
        """Act on expired deadlines. The registry calls this a few times per second."""
        if now >= self._write_deadline:
            self._check_writing()
        elif now < self._deadline:
            return
        elif self._phase is HEAD:
            self._refuse(RequestTimeout(f"The request's headers did not arrive within {HEADER_SECONDS:g} s."), "header_timeout")
        elif self._phase is WAITING:
            self.transport.close()
        elif self._phase is WORKING:
            self._check_body(now)
        elif self.transport.get_write_buffer_size():
            self._deadline = now + LINGER_SECONDS
        else:
            self.transport.abort()

    def _check_body(self, now: float) -> None:
        seconds, rate = BODY_SECONDS, BODY_BYTES_PER_SECOND
        self._deadline = self._body_began + seconds + self._body_bytes / rate
        if now >= self._deadline:
            words = f"The request's body did not arrive within {seconds:g} s, or came slower than {rate} bytes/s after that."
            self._body_failed(RequestTimeout(words), "body_timeout")

    def pause_writing(self) -> None:
        """Start the deadline for the client to read, because the write buffer is full."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """End the deadline for the client to read, because it has read enough."""
        super().resume_writing()
        if self._phase is not CLOSING:  # while closing, the client must read everything in time
            self._write_deadline = inf

    def _await_reader(self) -> None:
        self._unwritten = self.transport.get_write_buffer_size()
        self._write_deadline = self.loop.time() + WRITE_SECONDS

    def _check_writing(self) -> None:
        """Abort if the client has read nothing since the last check. The disconnect cancels the request's work."""
        unwritten = self.transport.get_write_buffer_size()
        if unwritten and unwritten >= self._unwritten:
            self._connections.telemetry.rejected.labels("write_timeout").inc()
            self.transport.abort()
        elif unwritten:
            self._await_reader()
        else:
            self._write_deadline = inf

    def _close(self) -> None:
        """Close after all output is sent. If the client may still be sending, it first gets time to read the response."""
        inner = self.transport.inner
        lingers = self._phase is not CLOSING and (self._dropping or (self.cycle is not None and self.cycle.more_body))
        self._phase = CLOSING
        self._dropping = True
        self._connections.works(self)
        if inner.is_closing():
            return
        self._await_reader()
        if lingers:
            self._deadline = self.loop.time() + LINGER_SECONDS
            inner.write_eof()
            self.flow.resume_reading()
        else:
            self._deadline = inf
            inner.close()

    def _refuse(self, error: GatewayError, reason: str) -> None:
        """Answer with ``error`` without the application, and close."""
        self._connections.telemetry.rejected.labels(reason).inc()
        request_id = new_id()
        if (log := self._connections.log) is not None:
            log.refused(request_id, error.status, error.code or error.type, self.loop.time() - self._head_began)
        body = msgspec.json.encode(error.body)
        fields = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": request_id,
            "connection": "close",
            **error.headers,
        }
        lines = [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
        lines += [f"{name}: {value}\r\n".encode() for name, value in fields.items()]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        self._dropping = True
        self.transport.close()

    def _body_failed(self, error: GatewayError, reason: str) -> None:
        """Raise ``error`` in the application in place of the rest of the body."""
        self._connections.telemetry.rejected.labels(reason).inc()
        self._deadline = inf
        self._dropping = True
        self.cycle.fail(error)

    def _drop(self, size: int) -> None:
        self._dropped += size
        if self._dropped > MAX_DROPPED:
            self.transport.abort()

    def shutdown(self) -> None:
        """Close now, or after the response in progress, because the server shuts down."""
        self._keep_alive = False
        super().shutdown()

    def on_response_complete(self) -> None:
        """Wait for the next request after a complete response."""
        self._room = MAX_HEADER_BYTES
        self.server_state.total_requests += 1
        if self._phase is CLOSING or self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._phase = WAITING
        self._deadline = self.loop.time() + self._settings.idle_seconds
        self._connections.waits(self)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio takes a result
        """Refuse a request that is incomplete when the client ends its side of the connection. After a complete one, the client is
        taken to have left. Returns whether the connection stays open for the answer."""
        error = InvalidRequest("The connection ended before the request was complete; send the whole request.")
        incomplete = self._phase is WORKING and self.cycle.more_body
        if self._phase is HEAD:
            self._refuse(error, "parse")
        elif incomplete and not self._dropping:
            self._body_failed(error, "parse")
        return incomplete

    # --- bytes in

    def data_received(self, data: bytes) -> None:
        """Parse, or drop, bytes that arrived."""
        if self._dropping:
            self._drop(len(data))
            return
        if len(data) > self._room:
            self._feed_carefully(data)
        else:
            self._room -= len(data)
            self._feed(data)
        if self._phase is WAITING:
            self._phase = HEAD
            self._head_began = self.loop.time()
            self._deadline = self._head_began + HEADER_SECONDS

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._parse_failed(error)

    def _feed_carefully(self, data: bytes) -> None:
        """Feed ``data`` of which more than ``_room`` bytes may belong to the head, or to a chunked body."""
        if self._phase is WORKING:
            self._overhead += len(data)
            self._feed(data)
            if self._overhead > MAX_OVERHEAD and not self._dropping:
                self._body_failed(InvalidRequest("The chunked body has long extensions or trailers; send plain chunks."), "parse")
            return
        head, rest = data[: self._room], data[self._room :]
        self._room = 0
        if head:
            self._feed(head)
        if self._dropping:
            return
        if self._phase is WORKING:
            if rest:
                self.data_received(rest)
        else:
            words = f"Request line and headers are longer than {MAX_HEADER_BYTES} bytes; shorten them."
            self._refuse(HeadersTooLarge(words), "headers")

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its upgrade headers, because the parser skips the bodies of upgrade requests."""
        if self.parser.get_method() == b"CONNECT":
            self._refuse(MethodNotAllowed("CONNECT is not supported, because this server is not a proxy."), "parse")
            return
        tokens = [part.strip() for name, value in self.headers if name == b"connection" for part in value.lower().split(b",")]
        kept = b", ".join(token for token in tokens if token not in _OF_UPGRADES)
        headers = [(name, value) for name, value in self.headers if name not in _OF_UPGRADES]
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
        if self._phase is not WORKING:
            self._refuse(refusal, "headers" if refusal.status == HeadersTooLarge.status else "parse")
        elif self.cycle.more_body and not isinstance(cause, _Pipelined):
            self._body_failed(refusal, "parse")
        else:  # the next request arrived before the response
            self._dropping = True
            self.cycle.keep_alive = False

    # --- events of the parser

    def on_message_begin(self) -> None:
        """Start a request. Raises :class:`_Pipelined` while another is in progress."""
        if self._phase is WORKING:
            raise _Pipelined
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header or a trailer."""
        name = name.lower()
        self.headers.append((name, value))
        if len(self.headers) > MAX_HEADERS:  # checked per header: 64 KiB of headers would take 10 ms
            raise HeadersTooLarge(f"The request has more than {MAX_HEADERS} headers; send fewer.")

    def on_headers_complete(self) -> None:
        """Check the complete head and start the application."""
        parser, scope = self.parser, self.scope
        if parser.should_upgrade():
            return  # _ignore_upgrade parses it again
        incoming = Incoming(self.headers)
        headers = incoming.headers
        version = parser.get_http_version()
        if version != "1.1":
            if version != "1.0":
                raise InvalidRequest("This server supports HTTP/1.1 and HTTP/1.0 only.")
            scope["http_version"] = version
        host = headers.get(b"host")
        if (b"," in host) if host is not None else version == "1.1":  # a comma means several Host headers
            raise InvalidRequest("A request needs exactly one Host header, which names one host.")
        url = httptools.parse_url(self.url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        scope["method"] = parser.get_method().decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = raw_path
        scope["query_string"] = url.query or b""
        self._phase = WORKING
        self._body_began = self.loop.time()
        self._body_bytes = self._overhead = 0
        self._deadline = self._body_began + BODY_SECONDS
        self._room = -1 if b"transfer-encoding" in headers else sys.maxsize
        self._keep_alive = version == "1.1" and parser.should_keep_alive()
        self._connections.works(self)
        self.headers = []  # collects trailers, which are dropped
        self.cycle = Cycle(
            scope=scope,
            transport=self.transport,  # type: ignore[arg-type]
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=headers.get(b"expect", b"").lower() == b"100-continue",
            keep_alive=False,  # until the request is complete: an unread rest of a body closes the connection
            on_response=self.on_response_complete,
        )
        self._incoming = scope[INCOMING] = incoming  # type: ignore[literal-required]
        incoming.cycle = weakref.ref(self.cycle)
        self._start_asgi_task(self.cycle, self.app)

    def on_chunk_header(self) -> None:
        """Deduct the normal framing of a chunk."""
        self._overhead -= CHUNK_OVERHEAD

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
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
        """Mark the request as complete."""
        cycle = self.cycle
        if self._phase is WORKING and not cycle.response_complete:
            self._deadline = inf
            cycle.more_body = False
            self._incoming.complete = True
            if not cycle.response_started:
                cycle.keep_alive = self._keep_alive
            cycle.message_event.set()


def _plain(error: httptools.HttpParserError) -> str:
    """Return the parser's reason, which contains no input of the client."""
    words = str(error)
    return words[:1].lower() + words[1:] if words.isprintable() and "callback" not in words.lower() else "the URL cannot be read"
