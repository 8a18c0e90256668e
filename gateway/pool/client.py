"""HTTP client of one engine pod (protocol: ``engine/wire.py``). Leaving a call closes its connection, which aborts the request."""

from __future__ import annotations

import asyncio
import copy
import errno
import logging
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

import msgspec
from yarl import URL

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import EngineLost, EngineSilent, GatewayError, from_engine
from yardstick_llm.gateway.http.context import engine_deadline
from yardstick_llm.gateway.ops.tracing import Stage
from yardstick_llm.gateway.pool.connection import Connections, EngineStream, OnDelta, unreadable
from yardstick_llm.gateway.schemas.common import new_id

logger = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""Read timeout of a probe; the next probe uses another connection."""
TOKENIZER_SECONDS = 30.0
"""Time limit for fetching the tokeniser files: tens of megabytes, from an engine that may be busy."""

T = TypeVar("T", bound=msgspec.Struct)


class Readiness(msgspec.Struct, frozen=True):
    """An engine's answer to a probe."""

    ready: bool
    model: str | None = None
    """Name of the model that the engine serves or loads; None where the answer does not name it."""
    adapters: str | None = None
    """Revision of the engine's adapters; None where the answer has none."""


UNANSWERED = Readiness(ready=False)
"""Stands for the answer of an engine that gives none."""

REFUSED = Readiness(ready=False)
"""Stands for the answer of an engine whose port refuses connections: its process has ended, and all its connections with it."""


class FoundAdapters(NamedTuple):
    """The adapters of an engine, and their revision; None where the answer has none."""

    adapters: wire.Adapters
    revision: str | None


class EngineToken:
    """Bearer token that authenticates the gateway to engines: the first line of ``file``, which may be replaced at any time."""

    def __init__(self, file: Path) -> None:
        """Raises :class:`OSError`, and :class:`ValueError` where the file holds no token."""
        self._file = file
        self._version = self._stat()
        self._header = self._read()

    @property
    def header(self) -> str:
        """Line of a request's head. While the file is missing or holds no token, the token that was read last stays valid."""
        try:
            if (version := self._stat()) != self._version:
                self._header, self._version = self._read(), version
        except (OSError, ValueError) as error:
            logger.warning("the engines' token cannot be read again: %s", error)
        return self._header

    def _stat(self) -> tuple[int, int, int]:
        found = os.stat(self._file)  # noqa: PTH116  runs once per request and is twice as fast as pathlib's stat
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _read(self) -> str:
        token = self._file.read_text("ascii").strip().partition("\n")[0].strip()
        if not token or not token.isprintable() or " " in token:
            raise ValueError(f"{self._file} holds no token; its first line should be one, of printable characters without spaces")
        return f"authorization: Bearer {token}\r\n"


class EngineClient:
    """Client of the pod at ``url``. Every method raises :class:`GatewayError` if the pod refuses or cannot be reached, except
    :meth:`ready`, which returns :data:`REFUSED` or :data:`UNANSWERED` if there is no answer.

    Each call gets its own id, because the pod may still be running or aborting an earlier attempt of the same request.
    """

    def __init__(self, url: str, *, connect_seconds: float, engine_seconds: float, token: EngineToken | None = None) -> None:
        self.url = url
        parsed = URL(url)
        self._base, self._host = parsed.raw_path.rstrip("/"), parsed.host_port_subcomponent
        self._connections = Connections(parsed, connect_seconds=connect_seconds)
        self._engine_seconds = engine_seconds
        self._token = token
        self._trace = ""

    def traced(self, span: Stage | None) -> EngineClient:
        """Return a client of the same pod that sends the context of ``span`` with each message; this client if there is none."""
        if span is None:
            return self
        client = copy.copy(self)
        client._trace = "".join(f"{name}: {value}\r\n" for name, value in span.context.headers.items())
        return client

    def close(self) -> None:
        """Close idle connections."""
        self._connections.close()

    async def ready(self) -> Readiness:
        """Return whether the pod takes requests, its model and the revision of its adapters."""
        try:
            stream, _ = await self._get("/readyz")
        except GatewayError as error:  # its context is the error of the socket; of several addresses, one text has them all
            return REFUSED if f"[Errno {errno.ECONNREFUSED}]" in str(error.__context__) else UNANSWERED
        name = _header(stream, wire.MODEL_HEADER)
        return Readiness(stream.status == 200, None if name is None else unquote(name), _header(stream, wire.ADAPTERS_HEADER))

    async def info(self) -> wire.Info:
        """Fetch the description of the model that the pod serves."""
        return _read(wire.Info, *await self._get("/info"))

    async def tokenizer(self) -> wire.TokenizerFiles:
        """Fetch the tokeniser files and the chat template of the pod's model."""
        try:
            async with asyncio.timeout(TOKENIZER_SECONDS):
                return _read(wire.TokenizerFiles, *await self._get("/tokenizer", self._engine_seconds))
        except TimeoutError:
            raise EngineSilent(f"The engine did not send its tokeniser within {TOKENIZER_SECONDS:g} s.") from None

    async def stats(self) -> wire.Stats:
        """Fetch the counters and gauges of the pod."""
        return _read(wire.Stats, *await self._get("/stats"))

    async def adapters(self) -> FoundAdapters:
        """Fetch the adapters of the pod."""
        stream, content = await self._get("/adapters")
        return FoundAdapters(_read(wire.Adapters, stream, content), _header(stream, wire.ADAPTERS_HEADER))

    async def load_adapter(self, load: wire.LoadAdapter) -> wire.Adapter:
        """Load an adapter, which may take minutes."""
        return _read(wire.Adapter, *await self._post("/adapters/load", load))

    async def unload_adapter(self, unload: wire.UnloadAdapter) -> None:
        """Unload an adapter."""
        stream, content = await self._post("/adapters/unload", unload)
        if stream.status >= 300:
            raise _failure(stream.status, content)

    async def score(self, score: wire.Score | wire.ScoreItems) -> wire.Scored:
        """Score one sub-batch. The deadline is that of the client or the read timeout, so that the engine stops when the gateway
        does."""
        score = msgspec.structs.replace(score, id=new_id(), deadline=engine_deadline(self._engine_seconds))
        return _read(wire.Scored, *await self._post("/score", score))

    async def generate(self, generate: wire.Generate, on_delta: OnDelta | None = None) -> AsyncGenerator[list[wire.Delta], None]:
        """Yield the deltas of all sequences in batches, as they arrive, except single ones that ``on_delta`` processes.
        Close the iterator to abort. The deadline to begin is set as for scores."""
        generate = msgspec.structs.replace(generate, id=new_id(), deadline=engine_deadline(self._engine_seconds))
        request = self._request("POST", "/generate", wire.encode(generate))
        stream = await self._connections.take()
        try:
            stream.send(request, self._engine_seconds)
            while replies := await stream.read(on_delta):
                deltas: list[wire.Delta] = []  # filled by a loop: a comprehension is one more call for each token
                for reply in replies:
                    if isinstance(reply, wire.Delta):
                        deltas.append(reply)
                if deltas:
                    yield deltas
                if len(deltas) < len(replies):
                    raise from_engine(_failed_reply(replies))
            if stream.status != 200:
                raise _failure(stream.status, stream.refusal)
        finally:
            self._connections.give_back(stream)

    async def _post(self, path: str, message: msgspec.Struct) -> tuple[EngineStream, bytes | bytearray]:
        return await self._exchange(self._request("POST", path, wire.encode(message)), self._engine_seconds)

    async def _get(self, path: str, silence_seconds: float = PROBE_SECONDS) -> tuple[EngineStream, bytes | bytearray]:
        reused = bool(self._connections.idle)
        try:
            return await self._exchange(self._request("GET", path), silence_seconds)
        except EngineLost:
            if not reused:
                raise
        return await self._exchange(self._request("GET", path), silence_seconds)  # a proxy may just have closed an idle connection

    async def _exchange(self, request: bytes, silence_seconds: float) -> tuple[EngineStream, bytes | bytearray]:
        """Return the connection, which has the status and the headers of the answer, and the body."""
        stream = await self._connections.take()
        try:
            stream.send(request, silence_seconds, framed=False)
            return stream, await stream.read_whole()
        finally:
            self._connections.give_back(stream)

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Return a whole request."""
        token = self._token.header if self._token else ""
        content = "" if body is None else f"content-type: {wire.MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
        head = f"{method} {self._base}{path} HTTP/1.1\r\nhost: {self._host}\r\n{token}{self._trace}{content}\r\n"
        return head.encode("ascii") + (body or b"")


def _header(stream: EngineStream, name: str) -> str | None:
    value = stream.headers.get(name.encode())
    return None if value is None else value.decode("utf-8", "replace")


def _read(kind: type[T], stream: EngineStream, content: bytes | bytearray) -> T:
    if stream.status != 200:
        raise _failure(stream.status, content)
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except msgspec.DecodeError:
        raise unreadable() from None


def _failure(status: int, content: bytes | bytearray) -> GatewayError:
    """Return the error for an answer without a result."""
    try:
        failed = msgspec.msgpack.decode(content, type=wire.Failed)
    except msgspec.DecodeError:  # not the engine's format: the engine crashed, or another program listens on the port
        if status == 401:
            failed = wire.Failed("", "not_ready", "The engine does not accept the gateway's token.", retryable=True, retry_after=1)
        else:
            message = f"The engine failed with status {status} and gave no reason; try again."
            failed = wire.Failed("", "internal", message, retryable=status >= 500)
    return from_engine(failed)


def _failed_reply(replies: list[wire.Reply]) -> wire.Failed:
    """Return the failure among the messages of a stream, which are deltas otherwise."""
    failed = next((reply for reply in replies if isinstance(reply, wire.Failed)), None)
    return failed or wire.Failed("", "internal", "The engine answered a generation with a message of another kind.")
