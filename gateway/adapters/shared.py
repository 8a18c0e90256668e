"""Loaded adapters in Redis, shared by all gateways: the hash ``PREFIX:{adapters}:loaded`` from ``base:adapter`` to msgpack."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from gateway.adapters.store import MOST_KEPT, Full, Loaded, Unavailable
from gateway.pool.adapters import Reference
from gateway.redis.link import Link, RedisAway
from gateway.redis.scripts import Script

logger = logging.getLogger(__name__)

SECONDS = 1.0
"""Longest wait for Redis: loading an adapter takes longer than this in any case."""

# KEYS: the hash. ARGV: field, value, most fields. Returns 0 if there is no room.
_PUT = Script(
    """
    if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then
        return 0
    end
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
    return 1
    """
)
_decoder = msgspec.msgpack.Decoder(Loaded)


class RedisLoaded:
    """Remembers in Redis."""

    def __init__(self, link: Link, *, prefix: str, most: int = MOST_KEPT) -> None:
        self._link = link
        self._name = f"{prefix}:{{adapters}}:loaded"
        self._most = most

    async def all(self) -> dict[Reference, Loaded]:
        """See :class:`LoadedStore`. Entries that cannot be read are left out."""
        values = await self._ask(lambda: self._link.client.execute_command("HVALS", self._name))
        found: dict[Reference, Loaded] = {}
        for value in values:
            try:
                loaded = _decoder.decode(value)
            except msgspec.DecodeError:
                logger.error("Redis: an entry of %s cannot be read", self._name)
            else:
                found[loaded.reference] = loaded
        return found

    async def put(self, loaded: Loaded) -> None:
        """See :class:`LoadedStore`."""
        arguments = [str(loaded.reference), msgspec.msgpack.encode(loaded), self._most]
        if not await self._ask(lambda: _PUT(self._link.client, [self._name], arguments)):
            raise Full

    async def remove(self, reference: Reference) -> bool:
        """See :class:`LoadedStore`."""
        return bool(await self._ask(lambda: self._link.client.execute_command("HDEL", self._name, str(reference))))

    async def _ask(self, command: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await self._link.ask(command, seconds=SECONDS)
        except RedisAway:
            raise Unavailable from None
