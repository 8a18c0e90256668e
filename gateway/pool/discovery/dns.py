"""Engines at the addresses of a DNS name, which is resolved periodically."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Sequence

from gateway.pool.discovery.base import Endpoint, http_url

logger = logging.getLogger(__name__)


class Dns:
    """One endpoint for each A and AAAA record of ``host``. A failed lookup changes nothing, because a headless Service without
    ready pods has no records either, and a resolver may fail; probes decide whether the known engines still answer."""

    def __init__(self, host: str, port: int, *, resolve_seconds: float) -> None:
        self._host, self._port = host, port
        self._resolve_seconds = resolve_seconds

    async def follow(self) -> AsyncGenerator[Sequence[Endpoint], None]:
        """Yield the endpoints after each lookup with a new result."""
        known: list[Endpoint] = []
        failing = False
        while True:
            try:
                found = await self._resolve()
            except OSError as error:
                if not failing:
                    logger.warning("%s cannot be resolved (%s); the engines stay as they were", self._host, error)
                failing = True
            else:
                failing = False
                if found != known:
                    known = found
                    yield known
            await asyncio.sleep(self._resolve_seconds)

    async def _resolve(self) -> list[Endpoint]:
        records = await asyncio.get_running_loop().getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        return sorted({Endpoint(http_url(str(address[0]), self._port)) for *_, address in records})
