"""Answers a request with an error before the web framework sees it."""

from __future__ import annotations

import msgspec
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.errors import GatewayError


def answer_refusal(error: GatewayError) -> ASGIApp:
    """Return an ASGI application that responds with ``error`` in OpenAI's format."""
    body = msgspec.json.encode(error.body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return app
