"""The open connections to engines that are not shared between requests."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial

from yarl import URL

from gateway.pool.faults import unreachable
from gateway.pool.stream import EngineStream


@cache
def _tls() -> ssl.SSLContext:
    """The authorities that sign certificates of engines. Gateways in one process share them, because reading them takes 30 ms."""
    return ssl.create_default_context()


class EngineStreams:
    """Opens connections to engines, and reuses idle ones."""

    def __init__(self, keepalive_seconds: float) -> None:
        """``keepalive_seconds``: time after which an idle connection is closed."""
        self._keepalive_seconds = keepalive_seconds
        self._tls = _tls()
        self._idle: dict[URL, list[EngineStream]] = {}

    @asynccontextmanager
    async def post(
        self,
        url: URL,
        headers: Mapping[str, str],
        body: bytes,
        *,
        connect_seconds: float,
        silence_seconds: float,
        framed: bool = True,
    ) -> AsyncIterator[EngineStream]:
        """Send a request. Leaving the block before the end of the answer aborts it. ``framed``: see :meth:`EngineStream.send`.
        Raises :class:`NotReady`."""
        stream = self._take_idle(url) or await self._connect(url, connect_seconds)
        fields = {"host": url.host_port_subcomponent, **headers, "content-length": len(body)}
        head = "".join([f"POST {url.raw_path} HTTP/1.1\r\n", *(f"{name}: {value}\r\n" for name, value in fields.items()), "\r\n"])
        stream.send(head.encode("ascii") + body, silence_seconds, framed=framed)
        try:
            yield stream
        finally:
            if stream.reusable:
                self._idle.setdefault(url, []).append(stream)
                stream.retire_after(self._keepalive_seconds, partial(self._retire, url, stream))
            else:
                stream.close()

    def close(self) -> None:
        """Close idle connections."""
        for stream in itertools.chain.from_iterable(self._idle.values()):
            stream.close()
        self._idle.clear()

    def _take_idle(self, url: URL) -> EngineStream | None:
        """Return the connection to ``url`` that was used last, if one is still open."""
        idle = self._idle.get(url, [])
        while idle:
            if (stream := idle.pop()).reusable:
                return stream
            stream.close()
        return None

    def _retire(self, url: URL, stream: EngineStream) -> None:
        """Close an idle connection."""
        stream.close()
        idle = self._idle[url]
        idle.remove(stream)
        if not idle:
            del self._idle[url]

    async def _connect(self, url: URL, seconds: float) -> EngineStream:
        tls = self._tls if url.scheme == "https" else None
        assert url.host is not None
        assert url.port is not None
        try:
            async with asyncio.timeout(seconds):
                _, stream = await asyncio.get_running_loop().create_connection(EngineStream, url.host, url.port, ssl=tls)
        except (OSError, TimeoutError):
            raise unreachable() from None
        return stream
