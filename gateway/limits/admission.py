"""Admission: how much the gateway takes on at a time."""

from __future__ import annotations

from litestar.enums import ScopeType
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.errors import Overloaded


class Admission(ASGIMiddleware):
    """Answers 429 while ``max_in_flight`` requests are being worked on, so that memory stays bounded and waits stay short."""

    scopes = (ScopeType.HTTP,)

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self.in_flight = 0

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Count the request until its answer is sent."""
        if self.in_flight >= self._max_in_flight:
            raise Overloaded("The server has as much to do as it can; try again soon.", retry_after=1)
        self.in_flight += 1
        try:
            await next_app(scope, receive, send)
        finally:
            self.in_flight -= 1
