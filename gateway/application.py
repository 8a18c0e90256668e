"""The ASGI application, and its answers to errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from litestar import Litestar, Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.types import HTTPScope

from gateway.context import RequestContext, answer_request
from gateway.edge.refusal import answer_refusal as answer_early
from gateway.error_sources import from_status
from gateway.errors import GatewayError
from gateway.logs.access import AccessLog
from gateway.metrics.telemetry import Telemetry
from gateway.process.lifecycle import Lifecycle
from gateway.tracing import Tracer

logger = logging.getLogger(__name__)


class Gateway(Litestar):
    """The ASGI application. Every request gets a :class:`RequestContext`, including one that matches no route."""

    def __init__(
        self,
        telemetry: Telemetry,
        lifecycle: Lifecycle,
        *,
        log: AccessLog | None,
        tracer: Tracer | None,
        protocol: Callable[..., asyncio.Protocol],
        check: Callable[[HTTPScope], GatewayError | None],
        **options: Any,
    ) -> None:
        """``protocol``: protocol factory for ``uvicorn.Config(http=…)``. ``check``: returns the error for a request that is
        refused. ``log`` and ``tracer``: None means that requests are not logged, and not traced."""
        super().__init__(**options)
        self.protocol = protocol
        self.telemetry = telemetry
        self._lifecycle = lifecycle
        self._log = log
        self._tracer = tracer
        self._check = check

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one ASGI scope."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        refusal = self._check(scope)
        app = super().__call__ if refusal is None else answer_early(refusal)
        if scope["method"] == "HEAD":  # the server omits the body, because its own copy of the scope says HEAD
            scope = scope | {"method": "GET"}
        await answer_request(app, self.telemetry, self._lifecycle, self._log, self._tracer, scope, receive, send)


def answer_error(request: Request[Any, Any, Any], error: GatewayError) -> Response[Any]:
    """Answer a request that failed with an error of ours."""
    RequestContext.of(request).failed(error)
    return Response(error.body, status_code=error.status, headers=error.headers)


def answer_refusal(request: Request[Any, Any, Any], error: HTTPException) -> Response[Any]:
    """Convert the framework's own errors. It refuses only empty bodies; ``routes/body.py`` handles all others."""
    detail = "The request body is empty; send a JSON object." if isinstance(error, ValidationException) else error.detail
    if error.status_code >= 500:
        return answer_fault(request, error)
    answer = answer_error(request, from_status(error.status_code, detail))
    answer.headers |= error.headers or {}
    return answer


def answer_fault(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """Answer a request that failed with any other error, which is logged and not shown."""
    logger.error("request %s failed", RequestContext.of(request).id.decode(), exc_info=error)
    return answer_error(request, from_status(500, ""))
