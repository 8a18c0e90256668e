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

from engine import wire
from gateway.errors import EngineSilent, GatewayError, from_engine
from gateway.http.context import engine_deadline
from gateway.ids import new_id
from gateway.ops.tracing import Stage
from gateway.pool.faults import Spoilt, unreadable
from gateway.pool.get_stream import Answer, GetStream
from gateway.pool.stream import OnDelta
from gateway.pool.streams import EngineCall, EngineStreams, Target

logger = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""Read timeout of a probe; the next probe uses another connection."""
TOKENIZER_SECONDS = 30.0
"""Time limit for fetching the tokeniser files: tens of megabytes, from an engine that may be busy."""
KEEPALIVE_SECONDS = 2.0
"""Idle connections close before the engine's server closes them (5 s in uvicorn), so that no request uses a closed connection."""

NO_ADAPTERS = wire.Adapters([], problem="it is older than adapters")
"""Stands for the answer of an engine without the path."""

T = TypeVar("T")

_scored = msgspec.msgpack.Decoder(wire.Scored)
_failed = msgspec.msgpack.Decoder(wire.Failed)
_info = msgspec.msgpack.Decoder(wire.Info)
_stats = msgspec.msgpack.Decoder(wire.Stats)
_adapters = msgspec.msgpack.Decoder(wire.Adapters)
_adapter = msgspec.msgpack.Decoder(wire.Adapter)
_tokenizer = msgspec.msgpack.Decoder(wire.TokenizerFiles)


class Connections:
    """The HTTP connections shared by all engine clients. Their number has no limit: admission bounds the number of requests."""

    def __init__(self) -> None:
        self.streams = EngineStreams(KEEPALIVE_SECONDS)

    async def close(self) -> None:
        """Close all connections."""
        self.streams.close()


class Readiness(msgspec.Struct, frozen=True):
    """An engine's answer to a probe."""

    ready: bool
    model: str | None
    """Name of the model that the engine serves or loads; None where the answer does not name it."""
    adapters: str | None
    """Revision of the engine's adapters; None where the answer has none."""


UNANSWERED = Readiness(ready=False, model=None, adapters=None)
"""Stands for the answer of an engine that gives none."""

REFUSED = Readiness(ready=False, model=None, adapters=None)
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
        self._headers = self._read()

    @property
    def headers(self) -> dict[str, str]:
        """The authorization header. While the file is missing or holds no token, the token that was read last stays valid."""
        try:
            if (version := self._stat()) != self._version:
                self._headers, self._version = self._read(), version
        except (OSError, ValueError) as error:
            logger.warning("the engines' token cannot be read again: %s", error)
        return self._headers

    def _stat(self) -> tuple[int, int, int]:
        found = os.stat(self._file)  # noqa: PTH116  runs once per request and is twice as fast as pathlib's stat
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _read(self) -> dict[str, str]:
        token = self._file.read_text("ascii").strip().partition("\n")[0].strip()
        if not token or not token.isprintable() or " " in token:
            raise ValueError(f"{self._file} holds no token; its first line should be one, of printable characters without spaces")
        return {"authorization": f"Bearer {token}"}


class EngineClient:
    """Client of the pod at ``url``. Every method raises :class:`GatewayError` if the pod refuses or cannot be reached, except
    :meth:`ready`, which returns :data:`REFUSED` or :data:`UNANSWERED` if there is no answer.

    Each call gets its own id, because the pod may still be running or aborting an earlier attempt of the same request.
    """

    def __init__(
        self,
        url: str,
        connections: Connections,
        *,
        connect_seconds: float,
        engine_seconds: float,
        token: EngineToken | None = None,
    ) -> None:
        self.url = url
        self._token = token
        self._engine_seconds = engine_seconds
        self._connect_seconds = connect_seconds
        self._connections = connections
        self.spoilt = Spoilt()
        self._get_target = Target(URL(url), GetStream)
        self._score_target = Target(URL(f"{url}/score"))
        self._generate_target = Target(URL(f"{url}/generate"))
        self._load_target = Target(URL(f"{url}/adapters/load"))
        self._unload_target = Target(URL(f"{url}/adapters/unload"))
        self._trace = b""

    def traced(self, span: Stage | None) -> EngineClient:
        """Return a client of the same pod that sends the context of ``span`` with each message; this client if there is none."""
        if span is None:
            return self
        client = copy.copy(self)
        client._trace = "".join(f"{name}: {value}\r\n" for name, value in span.context.headers.items()).encode("ascii")
        return client

    async def ready(self) -> Readiness:
        """Return whether the pod takes requests, its model and the revision of its adapters."""
        try:
            answer = await self._get("/readyz")
        except GatewayError as error:  # its context is the error of the socket; of several addresses, one text has them all
            return REFUSED if f"[Errno {errno.ECONNREFUSED}]" in str(error.__context__) else UNANSWERED
        name = _header(answer, wire.MODEL_HEADER)
        return Readiness(answer.status == 200, None if name is None else unquote(name), _header(answer, wire.ADAPTERS_HEADER))

    async def info(self) -> wire.Info:
        """Fetch the description of the model that the pod serves."""
        answer = await self._get("/info")
        return _read(_info, answer.status, answer.content)

    async def tokenizer(self) -> wire.TokenizerFiles:
        """Fetch the tokeniser files and the chat template of the pod's model."""
        try:
            async with asyncio.timeout(TOKENIZER_SECONDS):
                answer = await self._get("/tokenizer", self._engine_seconds)
        except TimeoutError:
            raise EngineSilent(f"The engine did not send its tokeniser within {TOKENIZER_SECONDS:g} s.") from None
        return _read(_tokenizer, answer.status, answer.content)

    async def adapters(self) -> FoundAdapters:
        """Fetch the adapters of the pod."""
        answer = await self._get("/adapters")
        found = NO_ADAPTERS if answer.status == 404 else _read(_adapters, answer.status, answer.content)
        return FoundAdapters(found, _header(answer, wire.ADAPTERS_HEADER))

    async def stats(self) -> wire.Stats:
        """Fetch the counters and gauges of the pod."""
        answer = await self._get("/stats")
        return _read(_stats, answer.status, answer.content)

    async def load_adapter(self, load: wire.LoadAdapter) -> wire.Adapter:
        """Load an adapter, which may take minutes."""
        async with self._post(self._load_target, wire.encode(load), framed=False) as stream:
            content = await stream.read_whole()
            return _read(_adapter, stream.status, content)

    async def unload_adapter(self, unload: wire.UnloadAdapter) -> None:
        """Unload an adapter."""
        async with self._post(self._unload_target, wire.encode(unload), framed=False) as stream:
            content = await stream.read_whole()
            if stream.status >= 300:
                raise from_engine(_failure(stream.status, content))

    async def score(self, score: wire.Score | wire.ScoreItems) -> wire.Scored:
        """Score one sub-batch. The deadline is that of the client or the read timeout, so that the engine stops when the gateway
        does."""
        score = msgspec.structs.replace(score, id=new_id(), deadline=engine_deadline(self._engine_seconds))
        async with self._post(self._score_target, wire.encode(score), framed=False) as stream:
            content = await stream.read_whole()
            return _read(_scored, stream.status, content)

    async def generate(self, generate: wire.Generate, on_delta: OnDelta | None = None) -> AsyncGenerator[list[wire.Delta], None]:
        """Yield the deltas of all sequences in batches, as they arrive, except single ones that ``on_delta`` processes.
        Close the iterator to abort. The deadline to begin is set as for scores."""
        generate = msgspec.structs.replace(generate, id=new_id(), deadline=engine_deadline(self._engine_seconds))
        async with self._post(self._generate_target, wire.encode(generate)) as stream:
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
                raise from_engine(_failure(stream.status, stream.refusal))

    def _post(self, target: Target, body: bytes, *, framed: bool = True) -> EngineCall:
        return self._connections.streams.post(
            target,
            {**self._headers, "content-type": wire.MEDIA_TYPE},
            body,
            more=self._trace,
            connect_seconds=self._connect_seconds,
            silence_seconds=self._engine_seconds,
            framed=framed,
        )

    async def _get(self, path: str, silence_seconds: float = PROBE_SECONDS) -> Answer:
        return await self._connections.streams.get(
            self._get_target,
            path,
            self._headers,
            connect_seconds=self._connect_seconds,
            silence_seconds=silence_seconds,
        )

    @property
    def _headers(self) -> dict[str, str]:
        return self._token.headers if self._token else {}


def _header(answer: Answer, name: str) -> str | None:
    value = answer.headers.get(name.encode())
    return None if value is None else value.decode("utf-8", "replace")


def _read(decoder: msgspec.msgpack.Decoder[T], status: int, content: bytes | bytearray) -> T:
    if status != 200:
        raise from_engine(_failure(status, content))
    try:
        return decoder.decode(content)
    except msgspec.DecodeError:
        raise unreadable() from None


def _failure(status: int, content: bytes | bytearray) -> wire.Failed:
    try:
        return _failed.decode(content)
    except msgspec.DecodeError:  # not the engine's format: the engine crashed, or another program listens on the port
        if status == 401:
            return wire.Failed("", "not_ready", "The engine does not accept the gateway's token.", retryable=True, retry_after=1)
        message = f"The engine failed with status {status} and gave no reason; try again."
        return wire.Failed("", "internal", message, retryable=status >= 500)


def _failed_reply(replies: list[wire.Reply]) -> wire.Failed:
    """Return the failure among the messages of a stream, which are deltas otherwise."""
    failed = next((reply for reply in replies if isinstance(reply, wire.Failed)), None)
    return failed or wire.Failed("", "internal", "The engine answered a generation with a message of another kind.")
