"""Paths of the pod that list, load and unload adapters."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, get, post

from engine import wire
from engine.serving.loop_client import LOADING, LoopClient

MAX_BODY = 1 << 16
Incoming = Request[Any, Any, Any]
_LOAD = msgspec.msgpack.Decoder(wire.LoadAdapter)
_UNLOAD = msgspec.msgpack.Decoder(wire.UnloadAdapter)


@get("/adapters")
async def adapters(request: Incoming) -> Response[bytes]:
    """All adapters."""
    client: LoopClient = request.app.state.client
    if client.ready is None or client.adapters is None:
        return _answer(wire.Failed("", "not_ready", client.refusal or LOADING, retryable=True, retry_after=1.0))
    return _answer(client.adapters, client.adapters_headers)


@post("/adapters/load", status_code=200, request_max_body_size=MAX_BODY)
async def load(request: Incoming) -> Response[bytes]:
    """Load an adapter from a directory of the engine's machine."""
    return await _change(request, _LOAD, "LoadAdapter")


@post("/adapters/unload", status_code=200, request_max_body_size=MAX_BODY)
async def unload(request: Incoming) -> Response[bytes]:
    """Unload an adapter."""
    return await _change(request, _UNLOAD, "UnloadAdapter")


async def _change(request: Incoming, decoder: msgspec.msgpack.Decoder[Any], name: str) -> Response[bytes]:
    try:
        command = decoder.decode(await request.body())
    except msgspec.DecodeError as error:
        return _answer(wire.Failed("", "invalid", f"The body is not a {name} message: {error}."))
    client: LoopClient = request.app.state.client
    result = await client.change_adapters(command)
    return Response(b"", status_code=204) if result is None else _answer(result)


def _answer(message: wire.Adapters | wire.Adapter | wire.Failed, headers: dict[str, str] | None = None) -> Response[bytes]:
    status = wire.STATUS_OF_CODE[message.code] if isinstance(message, wire.Failed) else 200
    return Response(wire.encode(message), status_code=status, media_type=wire.MEDIA_TYPE, headers=headers)


adapter_routes = [adapters, load, unload]
