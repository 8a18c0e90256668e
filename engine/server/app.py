"""HTTP app of a pod: the endpoints of :mod:`engine.wire`. It imports no torch; the model is in the loop process."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import msgspec
from litestar import Litestar, Request, Response, Router, get, post
from litestar.enums import MediaType
from litestar.response import Stream
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from yardstick_llm.engine import wire
from yardstick_llm.engine.server import channel, metrics
from yardstick_llm.engine.server.loop_client import LOADING, LoopClient
from yardstick_llm.engine.server.node import Node
from yardstick_llm.engine.server.tracing import Tracing
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.tracing.export import Exporter

logger = logging.getLogger(__name__)

_Version = tuple[int, int, int]
"""Inode, time of change in nanoseconds, size: a mounted Secret is replaced, not written."""


class BearerTokenError(ValueError):
    """The file has no token; the message is one line."""


class BearerTokens:
    """The tokens in a file, one a line, so that an old one can stay beside the new one while gateways change over.

    The file is read again when it has changed; while it cannot be read, the last good tokens stay.
    """

    def __init__(self, path: Path) -> None:
        """Raises :class:`BearerTokenError`."""
        self._path = path
        self._seen: _Version | None = None
        self._tokens: list[bytes] = []
        self._refresh()
        if not self._tokens:
            raise BearerTokenError(f"{path} has no token in it or cannot be read; write one into it, or leave out --token-file.")

    def opens(self, authorization: str) -> bool:
        """Whether the header's value is ``Bearer`` and a token. Takes as long for a wrong one as for a right one."""
        self._refresh()
        scheme, _, given = authorization.partition(" ")
        found = [hmac.compare_digest(given.strip().encode(), token) for token in self._tokens]
        return scheme.lower() == "bearer" and any(found)

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if version == self._seen:
                return
            tokens = self._path.read_bytes().split()
        except OSError as error:
            if self._seen is not None:
                logger.warning("the token file cannot be read (%s); the last tokens stay", error.strerror)
                self._seen = None
            return
        self._seen = version
        if tokens:
            self._tokens = tokens
        else:
            logger.warning("the token file is empty; the last tokens stay")


FRAMES = "application/x-msgpack-frames"
MAX_ADAPTER_BODY = 1 << 16

M = TypeVar("M")
Incoming = Request[Any, Any, Any]


def create_app(settings: EngineSettings, token: BearerTokens | None = None, exporter: Exporter | None = None) -> Litestar:
    """The one composition root of the pod's server. ``token`` None: every caller is welcome. ``exporter``: of traces, if on."""
    client = LoopClient(settings)

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        await client.start()
        if exporter is not None:
            exporter.start()
        try:
            yield
        finally:
            await client.close()
            if exporter is not None:
                await asyncio.to_thread(exporter.close)

    app = Litestar(
        route_handlers=[
            Router(
                "",
                route_handlers=[score, generate, abort, info, stats, tokenizer, adapters, load, unload],
                before_request=_authorise,
            ),
            livez,
            readyz,
            metrics_page,
        ],
        lifespan=[lifespan],
        openapi_config=None,
        request_max_body_size=None,
    )
    app.state.client = client
    app.state.token = token
    app.state.tracing = None if exporter is None else Tracing(settings.name, exporter)
    return app


def create_health_app(client: LoopClient | Node, tracing: Tracing | None = None) -> Litestar:
    """Health and metrics alone, for a port that probes and Prometheus may reach where the wire may not be reached."""
    app = Litestar(route_handlers=[livez, readyz, metrics_page], openapi_config=None, logging_config=None)
    app.state.client, app.state.tracing = client, tracing
    return app


def create_node_app(node: Node) -> Litestar:
    """The server of a node that gateways do not ask."""
    app = create_health_app(node)
    app.on_startup.append(node.start)
    app.on_shutdown.append(node.close)
    return app


@post("/score", status_code=200)
async def score(request: Incoming) -> Response[bytes]:
    """The readout of each branch of a prefix."""
    header = await _read(request, _SCORING, "Score")
    if isinstance(header, wire.Failed):
        return _answer(header)
    async with aclosing(await _ask(request, header)) as replies:
        return _answer(await _first(request, replies, header.id))


@post("/generate", status_code=200)
async def generate(request: Incoming) -> Response[bytes] | Stream:
    """A stream of frames. A failure before the first delta is the status of the response."""
    header = await _read(request, _GENERATE, "Generate")
    if isinstance(header, wire.Failed):
        return _answer(header)
    replies = await _ask(request, header)
    first = await _first(request, replies, header.id)
    if isinstance(first, wire.Failed):
        await replies.aclose()
        return _answer(first)
    return Stream(_frames(first, replies), media_type=FRAMES)


@post("/abort", status_code=204)
async def abort(request: Incoming) -> None:
    """End a request early."""
    message = await _read(request, _ABORT, "Abort")
    if isinstance(message, wire.Abort):
        _client(request).abort(message)


@get("/info")
async def info(request: Incoming) -> Response[bytes]:
    """Description of the model and its limits."""
    ready = _client(request).ready
    return _not_ready(request) if ready is None else _answer(ready.info)


@get("/tokenizer")
async def tokenizer(request: Incoming) -> Response[bytes]:
    """The model's tokeniser and chat template."""
    ready = _client(request).ready
    return _not_ready(request) if ready is None else _answer(ready.tokenizer)


@get("/stats")
async def stats(request: Incoming) -> Response[bytes]:
    """Counters and gauges of the engine."""
    current = _client(request).stats
    return _not_ready(request) if current is None else _answer(current)


@get("/adapters")
async def adapters(request: Incoming) -> Response[bytes]:
    """All adapters."""
    client = _client(request)
    if client.ready is None or client.adapters is None:
        return _not_ready(request)
    return _answer(client.adapters, client.adapters_headers)


@post("/adapters/load", status_code=200, request_max_body_size=MAX_ADAPTER_BODY)
async def load(request: Incoming) -> Response[bytes]:
    """Load an adapter from a directory of the engine's machine."""
    return await _change(request, _LOAD, "LoadAdapter")


@post("/adapters/unload", status_code=200, request_max_body_size=MAX_ADAPTER_BODY)
async def unload(request: Incoming) -> Response[bytes]:
    """Unload an adapter."""
    return await _change(request, _UNLOAD, "UnloadAdapter")


@get("/livez", media_type=MediaType.TEXT)
async def livez(request: Incoming) -> Response[str]:
    """Alive unless the loop has ended, or has made no progress for so long that the pod should be restarted."""
    problem = _client(request).dead
    return Response(problem or "ok", status_code=503 if problem else 200)


@get("/readyz", media_type=MediaType.TEXT)
async def readyz(request: Incoming) -> Response[str]:
    """Ready after the model is loaded and until the pod receives SIGTERM, while the loop makes progress."""
    client = _client(request)
    refusal = client.refusal
    headers = {wire.MODEL_HEADER: quote(client.name), **client.adapters_headers}
    return Response(refusal or "ok", status_code=503 if refusal else 200, headers=headers)


@get("/metrics", media_type=MediaType.TEXT)
async def metrics_page(request: Incoming) -> str:
    """Prometheus text."""
    client = _client(request)
    tracing: Tracing | None = request.app.state.tracing
    dropped = None if tracing is None else tracing.exporter.dropped
    silent = client.pulse.silent_seconds if client.pulse else None
    return metrics.render(client.stats, silent, dropped, client.settings, is_up=client.refusal is None)


async def _ask(request: Incoming, header: channel.Header) -> AsyncGenerator[wire.Reply]:
    """Send the request's message to the loop; returns the replies."""
    replies = _client(request).ask(header, await request.body(), time.monotonic())
    tracing: Tracing | None = request.app.state.tracing
    return replies if tracing is None else tracing.followed(header, request.headers, replies)


def _client(request: Incoming) -> LoopClient:
    client: LoopClient = request.app.state.client
    return client


async def _authorise(request: Incoming) -> Response[bytes] | None:
    """The answer to a caller without a token; None lets it pass. A coroutine, because Litestar runs functions in other threads."""
    token: BearerTokens | None = request.app.state.token
    if token is None or token.opens(request.headers.get("authorization", "")):
        return None
    reason = "This engine serves its gateways only: send their token as `Authorization: Bearer TOKEN`."
    return _answer(wire.Failed("", "unauthorized", reason, retryable=True))


_SCORING: msgspec.msgpack.Decoder[channel.ScoreHeader | channel.ScoreItemsHeader] = msgspec.msgpack.Decoder(channel.ScoringHeader)
_GENERATE = msgspec.msgpack.Decoder(channel.GenerateHeader)
_ABORT = msgspec.msgpack.Decoder(wire.Abort)
_LOAD = msgspec.msgpack.Decoder(wire.LoadAdapter)
_UNLOAD = msgspec.msgpack.Decoder(wire.UnloadAdapter)


async def _read(request: Incoming, decoder: msgspec.msgpack.Decoder[M], name: str) -> M | wire.Failed:
    """The header of the request's message, or why the body has none. The loop process decodes the rest."""
    try:
        return decoder.decode(await request.body())
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        return wire.Failed("", "invalid", f"The body is not a {name} message: {error}.")


def _answer(message: msgspec.Struct, headers: dict[str, str] | None = None) -> Response[bytes]:
    status = wire.STATUS_OF_CODE[message.code] if isinstance(message, wire.Failed) else 200
    return Response(wire.encode(message), status_code=status, media_type=wire.MEDIA_TYPE, headers=headers)


async def _change(request: Incoming, decoder: msgspec.msgpack.Decoder[M], name: str) -> Response[bytes]:
    command = await _read(request, decoder, name)
    if isinstance(command, wire.Failed):
        return _answer(command)
    assert isinstance(command, wire.LoadAdapter | wire.UnloadAdapter)
    result = await _client(request).change_adapters(command)
    return Response(b"", status_code=204) if result is None else _answer(result)


def _not_ready(request: Incoming) -> Response[bytes]:
    reason = _client(request).refusal or LOADING
    return _answer(wire.Failed("", "not_ready", reason, retryable=True, retry_after=1.0))


async def _frames(first: wire.Reply, replies: AsyncGenerator[wire.Reply]) -> AsyncIterator[bytes]:
    """Closed by the server when the client leaves, and then ``replies`` aborts the request."""
    async with aclosing(replies):
        yield wire.pack_frame(first)
        async for reply in replies:
            yield wire.pack_frame(reply)


async def _first(request: Incoming, replies: AsyncGenerator[wire.Reply], request_id: str) -> wire.Reply:
    """The first of ``replies``; a failure if the client closes the connection before."""
    connection = request.scope[CONNECTION]  # type: ignore[typeddict-item]

    def lost() -> None:
        _client(request).client_gone(request_id)

    connection.at_loss.append(lost)
    connection.flow.resume_reading()  # the end of a connection is not seen while reading is paused, as it is by a large body
    if connection.lost:
        asyncio.get_running_loop().call_soon(lost)
    try:
        return await anext(replies)
    finally:
        connection.at_loss.remove(lost)


CONNECTION: Literal["yardstick.connection"] = "yardstick.connection"
"""Key of the :class:`Protocol` in the ASGI scopes of its requests."""


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP, which also tells when a connection is lost, so that no request needs a task that waits for it."""

    lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.at_loss: list[Callable[[], None]] = []
        """Functions to call when the connection is lost."""
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        for call in [*self.at_loss]:
            call()
        super().connection_lost(exc)
