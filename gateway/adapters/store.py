"""The adapters that were loaded through the API, so that replicas that join later get them too: in Redis, or in memory."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from yardstick_llm.gateway.pool.adapters import Reference
from yardstick_llm.gateway.store.link import Link, RedisAway, Script

logger = logging.getLogger(__name__)

MOST_KEPT = 256
"""Most adapters that are remembered, of all models together."""
SECONDS = 1.0
"""Longest wait for Redis: loading an adapter takes longer than this in any case."""
TRIES = 8
"""Attempts to change the value while other gateways change it too."""

# KEYS: the value. ARGV: what was read ("" for nothing), and what replaces it. Returns 0 if it has changed since.
_REPLACE = Script(
    """
    if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then
        return 0
    end
    redis.call('SET', KEYS[1], ARGV[2])
    return 1
    """
)


class Unavailable(Exception):
    """The store cannot be read or changed at present."""


class Full(Exception):
    """There is no room for another adapter."""


class Loaded(msgspec.Struct, frozen=True):
    """An adapter that replicas should have."""

    base: str
    name: str
    path: str
    """The path that engines read."""
    digest: str
    """Digest that the first engine reported."""

    @property
    def reference(self) -> Reference:
        """Which adapter it is."""
        return Reference(self.base, self.name)


class LoadedStore(Protocol):
    """Where loaded adapters are remembered. Every method raises :class:`Unavailable`."""

    async def all(self) -> dict[Reference, Loaded]:
        """Return what is remembered."""

    async def put(self, loaded: Loaded) -> None:
        """Remember an adapter in place of an earlier one of its name. Raises :class:`Full`."""

    async def remove(self, reference: Reference) -> bool:
        """Forget an adapter; return whether it was remembered."""


class MemoryLoaded:
    """Remembers in this process: for one gateway, until it ends."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._loaded: dict[Reference, Loaded] = {}

    async def all(self) -> dict[Reference, Loaded]:
        """See :class:`LoadedStore`."""
        return dict(self._loaded)

    async def put(self, loaded: Loaded) -> None:
        """See :class:`LoadedStore`."""
        if loaded.reference not in self._loaded and len(self._loaded) >= self._most:
            raise Full
        self._loaded[loaded.reference] = loaded

    async def remove(self, reference: Reference) -> bool:
        """See :class:`LoadedStore`."""
        return self._loaded.pop(reference, None) is not None


class RedisLoaded:
    """Remembers in Redis, for all gateways: one value, ``PREFIX:{adapters}:loaded``, a list of :class:`Loaded` in msgpack. It is
    read often and changed rarely, and these commands need no more rights than the result cache and the limits."""

    def __init__(self, link: Link, *, prefix: str, most: int = MOST_KEPT) -> None:
        self._link = link
        self._name = f"{prefix}:{{adapters}}:loaded"
        self._most = most

    async def all(self) -> dict[Reference, Loaded]:
        """See :class:`LoadedStore`."""
        return self._decoded(await self._read())

    async def put(self, loaded: Loaded) -> None:
        """See :class:`LoadedStore`."""

        def add(known: dict[Reference, Loaded]) -> None:
            if loaded.reference not in known and len(known) >= self._most:
                raise Full
            known[loaded.reference] = loaded

        await self._change(add)

    async def remove(self, reference: Reference) -> bool:
        """See :class:`LoadedStore`."""
        removed: list[Loaded | None] = []
        await self._change(lambda known: removed.append(known.pop(reference, None)))
        return removed[-1] is not None

    async def _change(self, change: Callable[[dict[Reference, Loaded]], None]) -> None:
        """Read the value, change it, and write it unless another gateway has changed it meanwhile; then try again."""
        for _ in range(TRIES):
            content = await self._read()
            known = self._decoded(content)
            before = dict(known)
            change(known)
            if known == before:
                return
            arguments = [content, msgspec.msgpack.encode(list(known.values()))]
            if await self._ask(partial(_REPLACE, self._link.client, [self._name], arguments)):
                return
        raise Unavailable

    async def _read(self) -> bytes:
        return await self._ask(lambda: self._link.client.execute_command("GET", self._name)) or b""

    def _decoded(self, content: bytes) -> dict[Reference, Loaded]:
        try:
            return {loaded.reference: loaded for loaded in msgspec.msgpack.decode(content, type=list[Loaded])} if content else {}
        except msgspec.DecodeError:
            logger.error("Redis: %s is damaged; its entries are dropped", self._name)
            return {}

    async def _ask(self, command: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await self._link.ask(command, seconds=SECONDS)
        except RedisAway:
            raise Unavailable from None
