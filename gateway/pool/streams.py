"""The open connections to engines."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Mapping
from functools import cache, partial

from yarl import URL

from gateway.errors import EngineLost
from gateway.pool.faults import unreachable
from gateway.pool.get_stream import Answer, GetStream
from gateway.pool.stream import EngineStream


@cache
def _tls() -> ssl.SSLContext:
    """The authorities that sign certificates of engines. Gateways in one process share them, because reading them takes 30 ms."""
    return ssl.create_default_context()


class Target:
    """A URL that requests are posted to, or that the paths of ``GET`` requests are below."""

    def __init__(self, url: URL, connection: type[EngineStream] = EngineStream) -> None:
        """``connection``: :class:`GetStream` for ``GET`` requests."""
        self.url = url
        self.connection = connection
        self._headers: Mapping[str, str] | None = None
        self._head = b""

    def head(self, headers: Mapping[str, str]) -> bytes:
        """Return the head of a request, up to the value of ``content-length``."""
        if headers != self._headers:
            fields = {"host": self.url.host_port_subcomponent, **headers}
            lines = [f"POST {self.url.raw_path} HTTP/1.1\r\n", *(f"{name}: {value}\r\n" for name, value in fields.items())]
            self._headers, self._head = headers, "".join([*lines, "content-length: "]).encode("ascii")
        return self._head


class EngineStreams:
    """Opens connections to engines, and reuses idle ones."""

    def __init__(self, keepalive_seconds: float) -> None:
        """``keepalive_seconds``: time after which an idle connection is closed."""
        self._keepalive_seconds = keepalive_seconds
        self._tls = _tls()
        self._idle: dict[Target, list[EngineStream]] = {}

    def post(
        self,
        target: Target,
        headers: Mapping[str, str],
        body: bytes,
        *,
        more: bytes = b"",
        connect_seconds: float,
        silence_seconds: float,
        framed: bool = True,
    ) -> EngineCall:
        """Send a request. Leaving the block before the end of the answer aborts it. ``framed``: see :meth:`EngineStream.send`.
        ``more``: further lines of the head, which differ from request to request. Raises :class:`NotReady`."""
        request = b"%b%d\r\n%b\r\n%b" % (target.head(headers), len(body), more, body)
        return EngineCall(self, target, request, connect_seconds, silence_seconds, framed=framed)

    async def get(
        self, target: Target, path: str, headers: Mapping[str, str], *, connect_seconds: float, silence_seconds: float
    ) -> Answer:
        """Return the answer to ``GET`` of ``path`` below ``target``, whatever its status. Raises :class:`GatewayError`."""
        fields = {"host": target.url.host_port_subcomponent, **headers}
        lines = [
            f"GET {target.url.raw_path.rstrip('/')}{path} HTTP/1.1\r\n",
            *(f"{name}: {value}\r\n" for name, value in fields.items()),
            "\r\n",
        ]
        call = EngineCall(self, target, "".join(lines).encode("ascii"), connect_seconds, silence_seconds, framed=False)
        reused = bool(self._idle.get(target))
        try:
            return await _answer(call)
        except EngineLost:
            if not reused:
                raise
        return await _answer(call)  # a proxy may close an idle connection just when it is used again

    async def take(self, target: Target, connect_seconds: float) -> EngineStream:
        """Return the idle connection to ``target`` that was used last, or a new one. Raises :class:`NotReady`."""
        idle = self._idle.get(target, [])
        while idle:
            if (stream := idle.pop()).reusable:
                return stream
            stream.close()
        return await self._connect(target, connect_seconds)

    def give_back(self, target: Target, stream: EngineStream) -> None:
        """Keep a connection for the next request, or close it if its answer is incomplete."""
        if stream.reusable:
            self._idle.setdefault(target, []).append(stream)
            stream.retire_after(self._keepalive_seconds, partial(self._retire, target, stream))
        else:
            stream.close()

    def close(self) -> None:
        """Close idle connections."""
        for stream in itertools.chain.from_iterable(self._idle.values()):
            stream.close()
        self._idle.clear()

    def _retire(self, target: Target, stream: EngineStream) -> None:
        """Close an idle connection."""
        stream.close()
        idle = self._idle[target]
        idle.remove(stream)
        if not idle:
            del self._idle[target]

    async def _connect(self, target: Target, seconds: float) -> EngineStream:
        url = target.url
        tls = self._tls if url.scheme == "https" else None
        assert url.host is not None
        assert url.port is not None
        try:
            async with asyncio.timeout(seconds):
                _, stream = await asyncio.get_running_loop().create_connection(target.connection, url.host, url.port, ssl=tls)
        except (OSError, TimeoutError):
            raise unreachable() from None
        return stream


class EngineCall:
    """An async context manager around a request and its answer; entering it again sends the request again. It is no generator,
    because every request enters it."""

    __slots__ = ("_connect_seconds", "_framed", "_request", "_silence_seconds", "_stream", "_streams", "_target")

    def __init__(
        self,
        streams: EngineStreams,
        target: Target,
        request: bytes,
        connect_seconds: float,
        silence_seconds: float,
        *,
        framed: bool,
    ) -> None:
        self._streams = streams
        self._target = target
        self._request = request
        self._connect_seconds = connect_seconds
        self._silence_seconds = silence_seconds
        self._framed = framed

    async def __aenter__(self) -> EngineStream:
        self._stream = await self._streams.take(self._target, self._connect_seconds)
        self._stream.send(self._request, self._silence_seconds, framed=self._framed)
        return self._stream

    async def __aexit__(self, *_: object) -> None:
        self._streams.give_back(self._target, self._stream)


async def _answer(call: EngineCall) -> Answer:
    async with call as stream:
        assert isinstance(stream, GetStream)
        content = await stream.read_whole()
        return Answer(stream.status, stream.headers, content)
