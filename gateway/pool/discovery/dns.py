"""Engines at the addresses of a name, which are looked up again and again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Sequence

from gateway.pool.discovery.base import Endpoint, http_url

logger = logging.getLogger(__name__)


class Dns:
    """All A and AAAA records of ``host``. A name that is not found changes nothing: a headless Service whose pods are all away has
    no records either, and a resolver may fail; whether the last known engines answer is for the probes to say."""

    def __init__(self, host: str, port: int, *, resolve_seconds: float) -> None:
        self._host, self._port = host, port
        self._resolve_seconds = resolve_seconds

    async def follow(self) -> AsyncGenerator[Sequence[Endpoint], None]:
        """A list after each look-up that brought another result."""
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
