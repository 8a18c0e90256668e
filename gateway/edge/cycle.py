"""One request and its response on a connection."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from litestar.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.edge.transport import GatheringTransport
from gateway.errors import GatewayError

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


class Cycle(RequestResponseCycle):
    """uvicorn's cycle, extended with failures of the body. After a failure every ``receive`` raises it."""

    transport: GatheringTransport  # type: ignore[assignment]
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

    def write_now(self, data: bytes) -> None:
        """Do what :meth:`write` does, at once, unless earlier writes wait: it then follows them. For messages of a stream, of which
        an event loop iteration rarely has two; uvloop joins those."""
        if not data:  # an empty chunk would end the body
            return
        part = b"%x\r\n%b\r\n" % (len(data), data)
        transport = self.transport
        if transport.gathered:
            transport.write(part)
        elif not (inner := transport.inner).is_closing():
            inner.write(part)

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
