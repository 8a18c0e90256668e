"""Requests that wait for a replica: bounded in number and shared fairly between API keys."""

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
        """Places per unit of weight, with ``more`` places added."""
        return (len(self.waits) + more) / self.weight


class WaitingRoom:
    """``places`` for waiting requests. When all are taken, a new request evicts the newest request of the key with the most places
    per weight, unless its own key would then have more per weight. One key that floods the room cannot keep the others out."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._tenants: dict[str, _Tenant] = {}
        self.waiting = 0
        """Number of places that are taken."""

    async def wait(self, ready: Callable[[], Awaitable[object]], caller: wire.Caller) -> None:
        """Wait until ``ready()`` ends or the place is lost. Returns at once if there is no place."""
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
        except TimeoutError:  # _make_room gave the place to another key
            return

    def _make_room(self, tenant: _Tenant) -> bool:
        """Take a place from the key with the largest share, if that makes the shares more even. Returns whether it did."""
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
