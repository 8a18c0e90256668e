"""Requests that wait for a replica: a bounded number, shared fairly between API keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from engine import wire


class _Tenant:
    """The waiting requests of one API key, oldest first."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.waits: list[asyncio.Timeout] = []

    def share(self, more: int = 0) -> float:
        """Places per weight, with ``more`` places."""
        return (len(self.waits) + more) / self.weight


class WaitingRoom:
    """``places`` for requests. When all are taken, a request takes the place of the newest one of the key that has the most for its
    weight, unless its own key then had more: a key that floods the room cannot keep the others out."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._tenants: dict[str, _Tenant] = {}
        self.waiting = 0
        """Places that are taken."""

    async def wait(self, ready: Callable[[], Awaitable[object]], caller: wire.Caller) -> None:
        """Until ``ready()`` ends or the place is lost. Returns at once where there is no place."""
        tenant = self._tenants.get(caller.tenant) or _Tenant(caller.weight)
        if self.waiting >= self._places and not self._make_room(tenant):
            return
        self._tenants[caller.tenant] = tenant
        self.waiting += 1
        try:
            async with asyncio.timeout(None) as place:
                tenant.waits.append(place)
                try:
                    await ready()
                finally:
                    self._leave(tenant, caller.tenant, place)
        except TimeoutError:  # the place went to another key
            return

    def _make_room(self, tenant: _Tenant) -> bool:
        """Take a place from the key with the largest share, where that evens the shares out."""
        largest = max(self._tenants.values(), key=_Tenant.share, default=None)
        if largest is None or largest is tenant or largest.share(-1) < tenant.share(+1):
            return False
        newest = largest.waits.pop()
        self.waiting -= 1
        newest.reschedule(asyncio.get_running_loop().time())
        return True

    def _leave(self, tenant: _Tenant, name: str, place: asyncio.Timeout) -> None:
        if place in tenant.waits:
            tenant.waits.remove(place)
            self.waiting -= 1
        if not tenant.waits and self._tenants.get(name) is tenant:
            del self._tenants[name]
