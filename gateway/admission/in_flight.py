"""Admission: bounds the requests to ``/v1`` in progress and the bytes of their bodies, fairly between keys."""

from __future__ import annotations

from typing import Any, Self

from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.admission.quotas import Quotas
from gateway.context import RequestContext
from gateway.edge.body import BodyReader
from gateway.edge.middleware import HttpMiddleware
from gateway.errors import GatewayError, Overloaded
from gateway.ops.metrics import Telemetry
from gateway.ops.tracing import stage
from gateway.process.fair_room import FairRoom
from gateway.settings import Settings


class InFlightLimit(HttpMiddleware):
    """Reads the body and passes the complete request on. Answers 429 if too much is in progress.

    A request counts as in flight from the time when its body is complete; before that, it counts as an upload. :class:`FairRoom`
    shares each kind of room between keys, so this middleware stands behind :class:`~gateway.auth.require_key.RequireKey`.
    """

    def __init__(self, settings: Settings, telemetry: Telemetry, quotas: Quotas) -> None:
        self._quotas = quotas
        self._requests = FairRoom(settings.max_in_flight)
        self._bodies = BodyReader(settings, telemetry)
        self._telemetry = telemetry

    def __deepcopy__(self, _: object) -> Self:
        """Return this object: the framework copies routers and their contents, but all copies must share one admission."""
        return self

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Count the request until its answer is sent, and charge a refusal. Raises what :meth:`BodyReader.read` raises,
        :class:`Overloaded`, and :class:`RateLimited`."""
        context = RequestContext.in_scope(scope)
        tenant, weight = context.tenant
        hold = self._bodies.hold(tenant, weight)
        try:
            if scope["method"] in ("POST", "PUT"):  # type: ignore[typeddict-item]
                with stage("gateway.receive"):
                    body = await self._bodies.read(scope, receive, hold)
                receive = _replay(body, receive)
            if not self._requests.take(tenant, weight=weight):
                self._telemetry.rejected.labels("in_flight").inc()
                raise Overloaded("The server has too many requests in progress; try again soon.", retry_after=1)
            try:
                await next_app(scope, receive, send)
            finally:
                self._requests.give(tenant)
        except GatewayError as error:
            await self._quotas.charge_refusal(context, error)
            raise
        finally:
            hold.end()


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI ``receive`` that first gives ``body``, which has been read already, and then calls ``receive``."""
    kept: bytes | None = body

    async def replayed() -> Any:
        nonlocal kept
        if kept is None:
            return await receive()
        given, kept = kept, None
        return {"type": "http.request", "body": given, "more_body": False}

    return replayed
