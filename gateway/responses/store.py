"""The store of responses: a protocol, and a store in the memory of one gateway.

Responses belong to tenants, which are API keys. A tenant sees its own responses only. When the bound on entries is reached, the
tenant with most entries loses its oldest responses first, and when that on bytes is reached, the tenant with most bytes. So no
tenant can displace the responses of one that stores less.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from gateway.settings import ResponseBounds
from gateway.text.prepared import Items

ENTRY_BYTES = 1024
"""Bytes that an entry takes besides its contents."""


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """A stored response."""

    response: bytes
    """The response's body as JSON."""
    context: bytes
    """The items of the conversation up to this response, with its own: JSON values with commas between them."""
    input: Items
    """The items of the request."""

    @property
    def size(self) -> int:
        """Bytes that the entry takes, approximately."""
        ids = sum(map(len, self.input.ids)) + len(self.input.ends)
        return ENTRY_BYTES + len(self.response) + len(self.context) + len(self.input.content) + ids


class Unavailable(Exception):
    """The store does not answer."""


class ResponseStore(Protocol):
    """Keeps responses for a while. Every method may raise :class:`Unavailable`."""

    def check(self) -> None:
        """Raise :class:`Unavailable` if nothing can be stored at present."""

    async def get(self, tenant: str, id: str) -> Stored | None:
        """Return a response of ``tenant``; None if there is none."""

    async def put(self, tenant: str, id: str, stored: Stored) -> bool:
        """Store a response, and remove old ones for which there is no more room. Return False if it is larger than the store."""

    async def delete(self, tenant: str, id: str) -> bool:
        """Remove a response of ``tenant``. Return whether there was one."""


class _Entry(NamedTuple):
    stored: Stored
    size: int
    expires: float


class MemoryStore:
    """A store in memory. Its responses are lost when the gateway ends, and other gateways do not see them."""

    def __init__(self, bounds: ResponseBounds, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._tenants: dict[str, OrderedDict[str, _Entry]] = {}  # oldest first
        self._sizes: dict[str, int] = {}
        self.entries = 0
        self.bytes = 0

    def check(self) -> None:
        """Memory is always available."""

    async def get(self, tenant: str, id: str) -> Stored | None:
        """See :class:`ResponseStore`."""
        entries = self._tenants.get(tenant)
        entry = entries.get(id) if entries else None
        if entry is None or entry.expires <= self._clock():
            return None
        return entry.stored

    async def put(self, tenant: str, id: str, stored: Stored) -> bool:
        """See :class:`ResponseStore`."""
        size = stored.size
        if size > self._bounds.bytes or not self._bounds.entries:
            return False
        now = self._clock()
        self._expire(tenant, now)
        while (many := self.entries >= self._bounds.entries) or self.bytes + size > self._bounds.bytes:
            used = {name: len(entries) for name, entries in self._tenants.items()} if many else self._sizes
            largest = max(used, key=lambda name: (used[name], name))
            self._remove(largest, next(iter(self._tenants[largest])))
        self._tenants.setdefault(tenant, OrderedDict())[id] = _Entry(stored, size, now + self._bounds.seconds)
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size
        self.entries += 1
        self.bytes += size
        return True

    async def delete(self, tenant: str, id: str) -> bool:
        """See :class:`ResponseStore`."""
        found = await self.get(tenant, id) is not None
        if id in self._tenants.get(tenant, {}):
            self._remove(tenant, id)
        return found

    def _expire(self, tenant: str, now: float) -> None:
        """Remove the expired responses of ``tenant``. Those of others leave when they write, or when room is needed."""
        while (entries := self._tenants.get(tenant)) and (oldest := next(iter(entries.items())))[1].expires <= now:
            self._remove(tenant, oldest[0])

    def _remove(self, tenant: str, id: str) -> None:
        size = self._tenants[tenant].pop(id).size
        self.entries -= 1
        self.bytes -= size
        self._sizes[tenant] -= size
        if not self._tenants[tenant]:
            del self._tenants[tenant], self._sizes[tenant]
