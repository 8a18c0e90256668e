"""Reads request bodies and admits requests to ``/v1``. Bytes of each body, bytes of all bodies, uploads and requests in progress
are bounded, fairly between keys."""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, Self, TypeVar

import msgspec
from litestar.enums import ScopeType
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Receive, Scope, Send

from yardstick_llm.gateway.errors import BodyTooLarge, ClientGone, GatewayError, Overloaded, UnsupportedEncoding, from_status
from yardstick_llm.gateway.http.connection import Incoming
from yardstick_llm.gateway.http.context import RequestContext
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.ops.tracing import stage
from yardstick_llm.gateway.process.bounds import FairRoom
from yardstick_llm.gateway.settings import Settings

B = TypeVar("B", bound=msgspec.Struct)


class Body(Generic[B]):
    """The bytes of a request body that should hold a ``B`` as JSON, which ``gateway/api/reader.py`` decodes."""

    def __init__(self, content: bytes) -> None:
        self.content = content


class HttpMiddleware(ASGIMiddleware):
    """Middleware that handles every request of its routes, which are all HTTP.

    The framework's own call checks whether to leave a request out, in a coroutine of its own around ``handle``. With three
    middlewares that is 3 % of the function calls of a short chat.
    """

    scopes = (ScopeType.HTTP,)

    def __call__(self, app: ASGIApp) -> ASGIApp:
        """Return :meth:`handle` with ``app`` as the next application."""
        return partial(self.handle, next_app=app)

    def __deepcopy__(self, _: object) -> Self:
        """Return this object: the framework copies routers and their contents, but all copies must share keys and bounds."""
        return self


ChargeRefusal = Callable[[RequestContext, GatewayError], Awaitable[None]]
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


class InFlightLimit(HttpMiddleware):
    """Reads the body and passes the complete request on. Answers 429 if too much is in progress.

    A request counts as in flight from the time when its body is complete; before that, it counts as an upload. :class:`FairRoom`
    shares each kind of room between keys, so this middleware stands behind :class:`~gateway.http.auth.RequireKey`.
    """

    def __init__(self, settings: Settings, telemetry: Telemetry, charge_refusal: ChargeRefusal) -> None:
        """``charge_refusal``: called for each request that is refused with an error of ours."""
        self._charge_refusal = charge_refusal
        self._settings = settings
        self._telemetry = telemetry
        self._uploads = FairRoom(settings.max_uploads)
        self._bytes = FairRoom(settings.max_bytes_in_flight)
        self._requests = FairRoom(settings.max_in_flight)
        telemetry.bytes_in_flight.set_function(lambda: self._bytes.used)
        telemetry.uploads.set_function(lambda: self._uploads.used)

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Count the request until its answer is sent, and charge a refusal. Raises what :meth:`_read` raises, :class:`Overloaded`,
        and :class:`RateLimited`."""
        context = RequestContext.in_scope(scope)
        tenant, weight = context.tenant
        hold = Hold(self._bytes, tenant, weight, self._telemetry)
        try:
            if scope["method"] in ("POST", "PUT"):  # type: ignore[typeddict-item]
                with stage("gateway.receive"):
                    body = await self._read(scope, receive, hold)
                receive = _replay(body, receive)
            if not self._requests.take(tenant, weight=weight):
                raise self._counted(
                    "in_flight", Overloaded("The server has too many requests in progress; try again soon.", retry_after=1)
                )
            try:
                await next_app(scope, receive, send)
            finally:
                self._requests.give(tenant)
        except GatewayError as error:
            await self._charge_refusal(context, error)
            raise
        finally:
            hold.end()

    async def _read(self, scope: Scope, receive: Receive, hold: Hold) -> bytes:
        """Return the whole body. ``hold`` grows with it. The protocol limits the time.

        Raises :class:`BodyTooLarge`, :class:`Overloaded`, :class:`RequestTimeout`, :class:`UnsupportedEncoding`,
        :class:`InvalidRequest`, :class:`ClientGone`.
        """
        incoming = Incoming.of(scope)
        length = int(incoming.headers.get(b"content-length", b"0"))
        if length > self._settings.max_body_bytes:
            raise self._too_large()
        if incoming.headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise self._counted("content_encoding", UnsupportedEncoding("Compressed bodies are not read; send the body as it is."))
        if length:
            hold.grow_to(length)
        if not incoming.complete:
            return await self._read_upload(receive, hold)
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone(_GONE)
        body = message["body"]
        if len(body) > length:  # a chunked body has no length
            self._check(len(body), hold)
        return body

    async def _read_upload(self, receive: Receive, hold: Hold) -> bytes:
        """Read a body that may take long to arrive."""
        if not self._uploads.take(hold.tenant, weight=hold.weight):
            raise self._counted("uploads", Overloaded("Too many request bodies are being sent; try again soon.", retry_after=1))
        try:
            # closed before an error propagates, because a traceback may outlive the request
            with io.BytesIO() as body:
                more = True
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ClientGone(_GONE)
                    data, more = message["body"], message["more_body"]
                    self._check(body.tell() + len(data), hold)
                    body.write(data)
                return body.getvalue()  # does not copy
        finally:
            self._uploads.give(hold.tenant)

    def _check(self, size: int, hold: Hold) -> None:
        if size > self._settings.max_body_bytes:
            raise self._too_large()
        hold.grow_to(size)

    def _too_large(self) -> GatewayError:
        return self._counted("body_size", from_status(413, ""))

    def _counted(self, reason: str, error: GatewayError) -> GatewayError:
        self._telemetry.rejected.labels(reason).inc()
        return error


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI ``receive`` that first gives ``body``, which has been read already, and then calls ``receive``."""
    read: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Any:
        return read.pop() if read else await receive()

    return replayed
