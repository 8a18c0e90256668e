"""Engines that are where the settings say."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from gateway.pool.discovery.base import Endpoint


class Static:
    """One engine."""

    def __init__(self, url: str) -> None:
        self._endpoint = Endpoint(url)

    async def follow(self) -> AsyncGenerator[Sequence[Endpoint], None]:
        """The one endpoint, once."""
        yield [self._endpoint]
