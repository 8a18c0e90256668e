"""One HTTP/1.1 connection: uvicorn's protocol with bounds on the size of all input and on the time that it takes.

Differences from uvicorn, all of which docs/http.md describes:

- Requests that are not HTTP, too large or too slow get a response in OpenAI's error format.
- ``Upgrade`` is ignored, as RFC 9110 7.8 allows, and the body of such a request is read.
- One request at a time: bytes after a request are dropped until its response is complete, and the connection is then closed.
- A connection is closed in two steps if the client may still be sending, so that a TCP reset does not destroy the response.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from gateway.edge import lifetime
from gateway.edge.connections import Connections
from gateway.edge.cycle import INCOMING, Cycle, Incoming
from gateway.edge.lifetime import HEAD, WAITING, WORKING, BoundedConnection
from gateway.errors import GatewayError, HeadersTooLarge, InvalidRequest, MethodNotAllowed
from gateway.ops.access_log import AccessLog
from gateway.ops.metrics import Telemetry
from gateway.settings import Settings

MAX_HEADER_BYTES = 64 << 10
"""Largest request line and headers together, in bytes; larger ones are answered 431."""
MAX_HEADERS = 128
"""Most headers of a request; more are answered 431."""
SLICE = 16 * 1024
"""Bytes of a chunked body that are parsed per event loop iteration: at most 2,700 chunks, about a millisecond."""
CHUNK_OVERHEAD = 12
"""Bytes of framing that are allowed for each chunk."""
MAX_OVERHEAD = 64 * 1024
"""Bytes of a chunked body that are allowed beyond data and normal framing: chunk extensions and trailers."""
_HOP_BY_HOP = (b"upgrade", b"http2-settings", b"connection")
_NOT_HTTP = "This is not a valid HTTP/1.1 request: {}. Check the client and any proxy between it and this server."


class _Pipelined(Exception):
    """A request began before the response to the previous one was complete."""


def protocol_factory(settings: Settings, telemetry: Telemetry, log: AccessLog | None) -> Callable[..., Protocol]:
    """Return the protocol factory of one server, for ``uvicorn.Config(http=…)``."""
    return partial(Protocol, Connections(settings, telemetry, log))


class Protocol(BoundedConnection):
    """One connection: parses bytes and starts requests."""

    def __init__(self, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(connections, **uvicorn)
        self._room = MAX_HEADER_BYTES
        """Bytes that may be parsed in one piece. Before the head is complete, this is the rest of its size limit."""
        self._incoming = Incoming([])
        self._overhead = 0
        """Bytes of the chunked body beyond its data and the normal framing of its chunks."""
        self._backlog = memoryview(b"")
        """Unparsed bytes of a chunked body. Reading pauses meanwhile, so this is at most the data of one read."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request in progress."""
        super().connection_lost(exc)
        self._incoming.disconnected()

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
            self._deadline = self._head_began + lifetime.HEADER_SECONDS

    def _feed(self, data: bytes | memoryview) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(bytes(data[upgrade.args[0] :]))
        except httptools.HttpParserError as error:
            self._parse_failed(error)

    def _feed_carefully(self, data: bytes) -> None:
        """Feed ``data`` of which more than ``_room`` bytes may belong to the head, or to a chunked body."""
        if self._phase is WORKING:
            self._backlog = memoryview(data)
            self._feed_slice()
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

    def _feed_slice(self) -> None:
        """Parse one slice of a chunked body, and schedule the next slice for the next event loop iteration."""
        if not self._dropping:  # the connection may have ended since this call was scheduled
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
        """Parse the request again without its upgrade headers, because the parser skips the bodies of upgrade requests."""
        if self.parser.get_method() == b"CONNECT":
            self._refuse(MethodNotAllowed("CONNECT is not supported, because this server is not a proxy."), "parse")
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
        self._deadline = self._body_began + lifetime.BODY_SECONDS
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

    def on_response_complete(self) -> None:
        """Reset the bound on the head for the next request."""
        self._room = MAX_HEADER_BYTES
        super().on_response_complete()

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
