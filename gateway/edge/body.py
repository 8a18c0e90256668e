"""Reads request bodies: bounded in bytes, each by itself and all of them together."""

from __future__ import annotations

import asyncio
import io
from types import TracebackType
from typing import Protocol

from litestar.types import Receive, Scope

from gateway.edge.inflate import Inflater
from gateway.errors import ClientGone, GatewayError, Overloaded, from_status
from gateway.limits.fair import FairRoom
from gateway.settings import Settings
from gateway.telemetry import Telemetry

ARRIVING = "yardstick.arriving"
"""The key of the :class:`Arriving` in a scope. Where there is none, the body counts as incomplete."""


class Arriving(Protocol):
    """A request on its connection."""

    more_body: bool
    """Whether a part of the body has yet to arrive."""


class Hold:
    """The bytes that one request holds of the room for all bodies. A context manager that gives them back."""

    __slots__ = ("_bytes", "_room", "_telemetry", "tenant")

    def __init__(self, room: FairRoom, tenant: str | None, telemetry: Telemetry) -> None:
        self._room = room
        self.tenant = tenant
        self._telemetry = telemetry
        self._bytes = 0

    def grow_to(self, size: int) -> None:
        """Hold at least ``size`` bytes. Raises :class:`Overloaded` where there is no room for them."""
        more = size - self._bytes
        if more <= 0:
            return
        if not self._room.take(self.tenant, more):
            self._telemetry.rejected("bytes_in_flight")
            raise Overloaded("The bodies of the requests in progress leave no room for this one; try again soon.", retry_after=1)
        self._bytes = size

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bytes:
            self._room.give(self.tenant, self._bytes)


class BodyReader:
    """Reads the bodies of one server's requests."""

    def __init__(self, settings: Settings, telemetry: Telemetry) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self._uploads = FairRoom(settings.max_uploads)
        self._bytes = FairRoom(settings.max_bytes_in_flight)
        telemetry.watch_bodies(lambda: self._bytes.used, lambda: self._uploads.used)

    def hold(self, tenant: str | None) -> Hold:
        """A hold of a request of ``tenant``, on no bytes yet."""
        return Hold(self._bytes, tenant, self._telemetry)

    async def read(self, scope: Scope, receive: Receive, hold: Hold) -> bytes:
        """The whole body, inflated. ``hold`` grows with it. The protocol bounds the time.

        Raises :class:`BodyTooLarge`, :class:`Overloaded`, :class:`RequestTimeout`, :class:`UnsupportedEncoding`,
        :class:`InvalidRequest`, :class:`ClientGone`.
        """
        length, coding = 0, b""
        for name, value in scope["headers"]:
            if name == b"content-length":
                length = int(value)
            elif name == b"content-encoding":
                coding = b", ".join((coding, value)) if coding else value
        self._check_size(length)
        if coding and coding.strip().lower() != b"identity":
            return await self._read_upload(receive, hold, self._inflater(coding))
        hold.grow_to(length)
        arriving: Arriving | None = scope.get(ARRIVING)  # type: ignore[assignment]
        if arriving is None or arriving.more_body:
            return await self._read_upload(receive, hold, None)
        body, _ = await self._receive(receive)
        self._check_size(len(body))
        hold.grow_to(len(body))  # a chunked body has no length
        return body

    async def _read_upload(self, receive: Receive, hold: Hold, inflater: Inflater | None) -> bytes:
        """Read a body that may take long to arrive or to inflate."""
        if not self._uploads.take(hold.tenant):
            raise self._counted("uploads", Overloaded("Too many request bodies are being sent; try again soon.", retry_after=1))
        try:
            # closed before an error leaves, whose traceback may outlive the request
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
        """The next part of the body, and whether more follows."""
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone("The client left before its request was read.")
        return message["body"], message["more_body"]

    async def _inflate(self, body: io.BytesIO, data: bytes, hold: Hold, inflater: Inflater) -> None:
        for piece in inflater.feed(data):
            self._append(body, piece, hold)
            await asyncio.sleep(0)  # other requests have their turn

    def _append(self, body: io.BytesIO, data: bytes, hold: Hold) -> None:
        size = body.tell() + len(data)
        self._check_size(size)
        hold.grow_to(size)
        body.write(data)

    def _inflater(self, coding: bytes) -> Inflater:
        try:
            return Inflater(coding)
        except GatewayError:
            self._telemetry.rejected("content_encoding")
            raise

    def _check_size(self, size: int) -> None:
        if size > self._settings.max_body_bytes:
            raise self._counted("body_size", from_status(413, ""))

    def _counted(self, reason: str, error: GatewayError) -> GatewayError:
        self._telemetry.rejected(reason)
        return error
