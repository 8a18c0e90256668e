"""Reads request bodies. Both the bytes of each body and the bytes of all bodies together are bounded."""

from __future__ import annotations

import asyncio
import io

from litestar.types import Receive, Scope

from gateway.edge.cycle import Incoming
from gateway.edge.inflate import Inflater
from gateway.error_sources import from_status
from gateway.errors import BodyTooLarge, ClientGone, GatewayError, Overloaded
from gateway.ops.metrics import Telemetry
from gateway.process.fair_room import FairRoom
from gateway.settings import Settings

_GONE = "The client left before its request was read."


class Hold:
    """Bytes of the common body budget that one request holds until :meth:`end`."""

    __slots__ = ("_bytes", "_room", "_telemetry", "tenant", "weight")

    def __init__(self, room: FairRoom, tenant: str | None, weight: float, telemetry: Telemetry) -> None:
        self._room = room
        self.tenant = tenant
        self.weight = weight
        self._telemetry = telemetry
        self._bytes = 0

    def grow_to(self, size: int) -> None:
        """Hold at least ``size`` bytes. Raises :class:`Overloaded` if the budget does not allow it at present, and
        :class:`BodyTooLarge` if it never does."""
        more = size - self._bytes
        if more <= 0:
            return
        if not self._room.take(self.tenant, more, self.weight):
            self._telemetry.rejected.labels("bytes_in_flight").inc()
            most = self._room.most(self.tenant, self.weight)
            if size > most:
                raise BodyTooLarge(f"The request body is larger than the {most} bytes that one caller may have in progress.")
            raise Overloaded("The requests in progress use all memory for request bodies; try again soon.", retry_after=1)
        self._bytes = size

    def end(self) -> None:
        """Return the bytes to the budget."""
        if self._bytes:
            self._room.give(self.tenant, self._bytes)


class BodyReader:
    """Reads the bodies of one server's requests."""

    def __init__(self, settings: Settings, telemetry: Telemetry) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self._uploads = FairRoom(settings.max_uploads)
        self._bytes = FairRoom(settings.max_bytes_in_flight)
        telemetry.bytes_in_flight.set_function(lambda: self._bytes.used)
        telemetry.uploads.set_function(lambda: self._uploads.used)

    def hold(self, tenant: str | None, weight: float = 1.0) -> Hold:
        """Create the hold of a request of ``tenant``, with no bytes yet. ``weight`` scales the tenant's share."""
        return Hold(self._bytes, tenant, weight, self._telemetry)

    async def read(self, scope: Scope, receive: Receive, hold: Hold) -> bytes:
        """Return the whole inflated body. ``hold`` grows with it. The protocol limits the time.

        Raises :class:`BodyTooLarge`, :class:`Overloaded`, :class:`RequestTimeout`, :class:`UnsupportedEncoding`,
        :class:`InvalidRequest`, :class:`ClientGone`.
        """
        incoming = Incoming.of(scope)
        length = int(incoming.headers.get(b"content-length", b"0"))
        if length > self._settings.max_body_bytes:
            raise self._too_large()
        coding = incoming.headers.get(b"content-encoding")
        if coding is not None and coding.strip().lower() != b"identity":
            return await self._read_upload(receive, hold, self._inflater(coding))
        if length:
            hold.grow_to(length)
        if not incoming.complete:
            return await self._read_upload(receive, hold, None)
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone(_GONE)
        body = message["body"]
        if len(body) > length:  # a chunked body has no length
            self._check(len(body), hold)
        return body

    async def _read_upload(self, receive: Receive, hold: Hold, inflater: Inflater | None) -> bytes:
        """Read a body that may take long to arrive or to inflate."""
        if not self._uploads.take(hold.tenant, weight=hold.weight):
            raise self._counted("uploads", Overloaded("Too many request bodies are being sent; try again soon.", retry_after=1))
        try:
            # closed before an error propagates, because a traceback may outlive the request
            with io.BytesIO() as body:
                more = True
                while more:
                    data, more = await self._receive(receive)
                    if inflater is None:
                        self._append(body, data, hold)
                    else:
                        await self._inflate(body, data, hold, inflater)
                if inflater is not None:
                    inflater.end()
                return body.getvalue()  # does not copy
        finally:
            self._uploads.give(hold.tenant)

    async def _receive(self, receive: Receive) -> tuple[bytes, bool]:
        """Return the next part of the body, and whether more follows."""
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone(_GONE)
        return message["body"], message["more_body"]

    async def _inflate(self, body: io.BytesIO, data: bytes, hold: Hold, inflater: Inflater) -> None:
        for piece in inflater.feed(data):
            self._append(body, piece, hold)
            await asyncio.sleep(0)  # lets the event loop serve other requests

    def _append(self, body: io.BytesIO, data: bytes, hold: Hold) -> None:
        self._check(body.tell() + len(data), hold)
        body.write(data)

    def _check(self, size: int, hold: Hold) -> None:
        if size > self._settings.max_body_bytes:
            raise self._too_large()
        hold.grow_to(size)

    def _inflater(self, coding: bytes) -> Inflater:
        try:
            return Inflater(coding)
        except GatewayError:
            self._telemetry.rejected.labels("content_encoding").inc()
            raise

    def _too_large(self) -> GatewayError:
        return self._counted("body_size", from_status(413, ""))

    def _counted(self, reason: str, error: GatewayError) -> GatewayError:
        self._telemetry.rejected.labels(reason).inc()
        return error
