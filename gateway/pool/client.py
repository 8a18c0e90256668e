"""One engine pod over HTTP, as ``engine/wire.py`` describes it. Leaving a call closes its connection, which aborts it there."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import aiohttp
import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport

from engine import wire
from gateway.errors import EngineLost, EngineSilent, GatewayError, NotReady, from_engine
from gateway.exchange import new_id

logger = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""Longest wait for an answer to a probe, after which another connection is tried."""
TOKENIZER_SECONDS = 30.0
"""Longest wait for the tokeniser's files: tens of megabytes, from an engine that may be busy."""
KEEPALIVE_SECONDS = 2.0
"""Idle connections go before the engine's server closes them (5 s in uvicorn), so that no request meets a closed one."""

T = TypeVar("T")

_MSGPACK = "application/msgpack"
_UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_scored = msgspec.msgpack.Decoder(wire.Scored)
_valued = msgspec.msgpack.Decoder(wire.Valued)
_failed = msgspec.msgpack.Decoder(wire.Failed)
_info = msgspec.msgpack.Decoder(wire.Info)
_tokenizer = msgspec.msgpack.Decoder(wire.TokenizerFiles)


def open_transport() -> AiohttpTransport:
    """Connections to engines. aiohttp's cost far less than httpx's own; 0 means that their number is bounded by admission alone."""
    return AiohttpTransport(limits=httpx.Limits(max_connections=0, keepalive_expiry=KEEPALIVE_SECONDS), trust_env=False)


class Readiness(msgspec.Struct, frozen=True):
    """An engine's answer to a probe."""

    ready: bool
    model: str | None
    """The model that it serves or loads, where it says so."""


class EngineToken:
    """The secret in the first line of ``file`` that engines know the gateway by; the file may be replaced at any time."""

    def __init__(self, file: Path) -> None:
        """Raises :class:`OSError`, and :class:`ValueError` where the file holds no token."""
        self._file = file
        self._version = self._stat()
        self._headers = self._read()

    @property
    def headers(self) -> dict[str, str]:
        """Those of a request. What was read last holds while the file is away or holds no token."""
        try:
            if (version := self._stat()) != self._version:
                self._headers, self._version = self._read(), version
        except (OSError, ValueError) as error:
            logger.warning("the engines' token cannot be read again: %s", error)
        return self._headers

    def _stat(self) -> tuple[int, int, int]:
        found = os.stat(self._file)  # noqa: PTH116  twice as fast as pathlib's, and once for each request
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _read(self) -> dict[str, str]:
        token = self._file.read_text("ascii").strip().partition("\n")[0].strip()
        if not token or not token.isprintable() or " " in token:
            raise ValueError(f"{self._file} holds no token; its first line should be one, of printable characters without spaces")
        return {"authorization": f"Bearer {token}"}


class EngineClient:
    """Speaks to the pod at ``url``. Every method raises :class:`GatewayError` where the pod refuses or cannot be reached.

    Each call has an id of its own: the pod may still be working on, or aborting, an earlier attempt of the same request.
    """

    def __init__(
        self,
        url: str,
        transport: httpx.AsyncBaseTransport,
        *,
        connect_seconds: float,
        engine_seconds: float,
        token: EngineToken | None = None,
    ) -> None:
        self.url = url
        self._token = token
        self._engine_seconds = engine_seconds
        self._transport = transport
        self._timeout = httpx.Timeout(engine_seconds, connect=connect_seconds).as_dict()
        self._probe_timeout = httpx.Timeout(PROBE_SECONDS, connect=connect_seconds).as_dict()
        self._score_url = httpx.URL(f"{url}/score")
        self._value_url = httpx.URL(f"{url}/value")
        self._generate_url = httpx.URL(f"{url}/generate")

    async def ready(self) -> Readiness | None:
        """Whether the pod takes requests; None where it does not answer."""
        request = self._get("/readyz", self._probe_timeout)
        try:
            answer = await self._fetch(request)
        except GatewayError:
            return None
        name = answer.headers.get(wire.MODEL_HEADER)
        return Readiness(answer.status_code == 200, None if name is None else unquote(name))

    async def info(self) -> wire.Info:
        """What the pod serves."""
        return _read(_info, await self._fetch(self._get("/info", self._probe_timeout)))

    async def tokenizer(self) -> wire.TokenizerFiles:
        """The text side of its model."""
        try:
            async with asyncio.timeout(TOKENIZER_SECONDS):
                return _read(_tokenizer, await self._fetch(self._get("/tokenizer", self._timeout)))
        except TimeoutError:
            raise EngineSilent(f"The engine did not send its tokeniser within {TOKENIZER_SECONDS:g} s.") from None

    async def score(self, score: wire.Score) -> wire.Scored:
        """One sub-batch. Where it has no deadline, it gets the time after which the answer would be waited for no longer."""
        deadline = self._engine_seconds if score.deadline is None else score.deadline
        score = msgspec.structs.replace(score, id=new_id(), deadline=deadline)
        return _read(_scored, await self._fetch(self._post(self._score_url, score)))

    async def value(self, value: wire.Value) -> wire.Valued:
        """One sub-batch of texts for the length model, with a deadline like a score's."""
        deadline = self._engine_seconds if value.deadline is None else value.deadline
        value = msgspec.structs.replace(value, id=new_id(), deadline=deadline)
        return _read(_valued, await self._fetch(self._post(self._value_url, value)))

    async def generate(self, generate: wire.Generate) -> AsyncGenerator[list[wire.Delta], None]:
        """The deltas of all sequences, as many at a time as have arrived. Close the iterator to abort."""
        generate = msgspec.structs.replace(generate, id=new_id())
        with _engine_errors():
            response = await self._transport.handle_async_request(self._post(self._generate_url, generate))
        try:
            if response.status_code != 200:
                with _engine_errors():
                    await response.aread()
                raise from_engine(_failure(response))
            async with aclosing(_deltas(response)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            await response.aclose()

    def _post(self, url: httpx.URL, message: wire.Score | wire.Value | wire.Generate) -> httpx.Request:
        headers = self._headers | {"content-type": _MSGPACK}
        return httpx.Request("POST", url, headers=headers, content=wire.encode(message), extensions={"timeout": self._timeout})

    def _get(self, path: str, timeout: dict[str, float | None]) -> httpx.Request:
        return httpx.Request("GET", f"{self.url}{path}", headers=self._headers, extensions={"timeout": timeout})

    @property
    def _headers(self) -> dict[str, str]:
        return self._token.headers if self._token else {}

    async def _fetch(self, request: httpx.Request) -> httpx.Response:
        with _engine_errors():
            response = await self._transport.handle_async_request(request)
            try:
                await response.aread()
            finally:
                await response.aclose()
        return response


async def _deltas(response: httpx.Response) -> AsyncGenerator[list[wire.Delta], None]:
    reader = wire.FrameReader()
    with _engine_errors():
        async for chunk in response.aiter_raw():
            batch: list[wire.Delta] = []
            failed: wire.Failed | None = None
            for reply in reader.feed(chunk):
                if isinstance(reply, wire.Delta):
                    batch.append(reply)
                else:
                    failed = reply if isinstance(reply, wire.Failed) else _nonsense()
            if batch:
                yield batch
            if failed:
                raise from_engine(failed)
        if reader.pending:
            raise EngineLost("The engine broke off in the middle of a message.", retryable=True)


def _read(decoder: msgspec.msgpack.Decoder[T], response: httpx.Response) -> T:
    if response.status_code != 200:
        raise from_engine(_failure(response))
    with _engine_errors():
        return decoder.decode(response.content)


def _failure(response: httpx.Response) -> wire.Failed:
    try:
        return _failed.decode(response.content)
    except msgspec.DecodeError:  # not the engine's own words: it crashed, or something else listens there
        if response.status_code == 401:
            return wire.Failed("", "not_ready", "The engine does not accept the gateway's token.", retryable=True, retry_after=1)
        message = f"The engine failed with status {response.status_code} and gave no reason; try again."
        return wire.Failed("", "internal", message, retryable=response.status_code >= 500)


def _nonsense() -> wire.Failed:
    return wire.Failed("", "internal", "The engine answered a generation with a message of another kind.")


@contextmanager
def _engine_errors() -> Iterator[None]:
    """What can go wrong on the way to an engine, as errors that a client may see."""
    try:
        yield
    except httpx.ReadTimeout:
        raise EngineSilent("The engine was silent for too long; try again, or ask for less at once.") from None
    except httpx.TransportError as error:
        # the transport gives a refused connection and a broken one the same class; their causes differ
        if isinstance(error.__cause__, _UNREACHABLE):
            raise NotReady("The model's engine cannot be reached; try again soon.", retry_after=1, retryable=True) from None
        raise EngineLost("The connection to the engine broke; try again.", retryable=True) from None
    except (msgspec.DecodeError, aiohttp.ClientError):  # the latter for what is not even HTTP
        raise EngineLost("The engine's answer cannot be read; its version may not match the gateway's.") from None
