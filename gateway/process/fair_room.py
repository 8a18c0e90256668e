"""Room shared between tenants, with dynamic thresholds."""

from __future__ import annotations

from typing import NamedTuple

ALPHA = 4.0
"""A single busy tenant may use four fifths of the room; each of n busy tenants gets 4/(1 + 4n), and 1/(1 + 4n) stays free."""
MAX_WEIGHT = 4.0
"""Largest effective weight. It allows 16/17 of the room to a single busy tenant, so that other tenants always find some room."""


class Tenant(NamedTuple):
    """Whom room is given to: a key, or on a server without keys everyone together."""

    id: str | None = None
    weight: float = 1.0


class FairRoom:
    """Room for ``capacity`` units, of which a tenant may hold at most ``alpha`` times what is still free.

    The fewer tenants are busy, the more each may hold, and a new tenant finds room without evicting another.
    Source: A. K. Choudhury and E. L. Hahne, "Dynamic queue length thresholds for shared-memory packet switches", IEEE/ACM
    Transactions on Networking 6 (2), 1998.
    """

    def __init__(self, capacity: int, alpha: float = ALPHA) -> None:
        self.capacity = capacity
        self.used = 0
        self._alpha = alpha
        self._held: dict[str, int] = {}

    def most(self, tenant: str | None, weight: float = 1.0) -> int:
        """Return the most units that one :meth:`take` can give ``tenant``: its units when no tenant holds any."""
        share = 1.0 if tenant is None else self._alpha * min(weight, MAX_WEIGHT)
        return int(min(share, 1.0) * self.capacity)

    def take(self, tenant: str | None, amount: int = 1, weight: float = 1.0) -> bool:
        """Take ``amount`` units for ``tenant`` and return True, or take nothing and return False. ``weight`` scales the threshold,
        up to ``MAX_WEIGHT``. Tenant None (a server without keys) may use all room."""
        free = self.capacity - self.used
        if amount > free:
            return False
        if tenant is not None:
            held = self._held.get(tenant, 0) + amount
            if held > self._alpha * min(weight, MAX_WEIGHT) * free:
                return False
            self._held[tenant] = held
        self.used += amount
        return True

    def give(self, tenant: str | None, amount: int = 1) -> None:
        """Give back ``amount`` units that ``tenant`` took."""
        self.used -= amount
        if tenant is not None:
            held = self._held[tenant] - amount
            assert held >= 0, "a tenant gives back no more than it holds"
            if held:
                self._held[tenant] = held
            else:
                del self._held[tenant]  # keys change over time, so empty entries are removed
