"""Lifetime of one connection: deadlines, closing, and responses without the application.

The base class, uvicorn's protocol, has a deadline only for idle connections.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from math import inf
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.edge.connections import Connections
from gateway.edge.cycle import Cycle
from gateway.edge.transport import GatheringTransport
from gateway.errors import GatewayError, Overloaded, RequestTimeout
from gateway.ids import new_id

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


class BoundedConnection(HttpToolsProtocol):
    """One connection with a deadline for every phase."""

    cycle: Cycle
    transport: GatheringTransport  # type: ignore[assignment]

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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start a new connection, or refuse it if there are too many."""
        super().connection_made(GatheringTransport(transport, self.loop, self._close))  # type: ignore[arg-type]
        if not self._connections.admit(self, self.loop):
            if self._connections.can_answer:
                self._refuse(Overloaded("This server has too many open connections; try again soon.", retry_after=1), "connections")
            else:
                self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the resources of a connection that ended."""
        self._connections.forget(self)
        self._deadline = self._write_deadline = inf
        self._dropping = True
        super().connection_lost(exc)

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

    def evict(self) -> None:
        """Abort the connection to make room for another."""
        self.transport.abort()

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
            self.transport.release()
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
        self.server_state.total_requests += 1
        if self._phase is CLOSING or self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._phase = WAITING
        self._deadline = self.loop.time() + self._settings.idle_seconds
        self._connections.waits(self)
