"""Engines at fixed URLs from the settings."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from gateway.pool.discovery.base import Endpoint


class Static:
    """A source with one fixed engine."""

    def __init__(self, url: str) -> None:
        self._endpoint = Endpoint(url)

    async def follow(self) -> AsyncGenerator[Sequence[Endpoint], None]:
        """Yield the endpoint once."""
        yield [self._endpoint]
