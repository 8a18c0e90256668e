"""Places that requests wait for, shared between tenants."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from gateway.process.fair_room import FairRoom, Tenant


class _Waiter(NamedTuple):
    weight: float
    ready: asyncio.Future[None]


class FairPlaces:
    """A semaphore of ``capacity`` places. :class:`FairRoom` bounds those of each tenant, so a tenant whose work takes long leaves
    places for others. The tenants that wait take turns."""

    def __init__(self, capacity: int) -> None:
        self._room = FairRoom(capacity)
        self._waiting: dict[str | None, deque[_Waiter]] = {}
        """By tenant, the one whose turn it is first."""

    @property
    def used(self) -> int:
        """Places that are taken."""
        return self._room.used

    async def take(self, tenant: Tenant) -> None:
        """Wait for a place. Call :meth:`give` for it later."""
        if tenant.id not in self._waiting and self._room.take(tenant.id, weight=tenant.weight):
            return
        waiter = _Waiter(tenant.weight, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant.id, deque()).append(waiter)
        try:
            await waiter.ready
        except asyncio.CancelledError:
            if waiter.ready.cancelled():
                self._remove(tenant.id, waiter)
            else:  # it got a place just before
                self.give(tenant)
            raise

    def give(self, tenant: Tenant) -> None:
        """Give a place back."""
        self._room.give(tenant.id)
        while self._admit_one():
            pass

    def _admit_one(self) -> bool:
        for id, waiters in self._waiting.items():
            first = waiters[0]
            if first.ready.cancelled() or self._room.take(id, weight=first.weight):
                if not first.ready.cancelled():
                    first.ready.set_result(None)
                self._remove(id, first)
                return True
        return False

    def _remove(self, tenant: str | None, waiter: _Waiter) -> None:
        """Remove ``waiter`` if it still waits. The tenant's next turn is after those of the others."""
        waiters = self._waiting.pop(tenant, None)
        if waiters is None:
            return
        if waiter in waiters:
            waiters.remove(waiter)
        if waiters:
            self._waiting[tenant] = waiters
