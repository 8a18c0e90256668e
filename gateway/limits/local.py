"""Limits kept in this process: for a gateway without Redis, and while Redis is away."""

from __future__ import annotations

import time
from collections import Counter

from gateway.limits.base import (
    BUSY_SECONDS,
    CONCURRENCY,
    MINUTE,
    NOTHING,
    RATES,
    Cost,
    Lease,
    Level,
    Limits,
    Verdict,
    level,
    too_much,
)


class LocalLimiter:
    """Keeps one time for each key and rate, and the number of leases of each key. Keys come from a file, so they are few."""

    def __init__(self) -> None:
        self._whole_at: dict[tuple[str, str], float] = {}  # by owner and rate: time of the whole allowance, monotonic clock
        self._held: Counter[str] = Counter()

    async def take(self, lease: Lease) -> Verdict:
        """Decide from this process's state."""
        now = time.monotonic()
        if name := too_much(lease.limits, lease.cost):
            return Verdict(name, float("inf"), self._levels(lease, now))
        denied, wait = self._shortage(lease, now)
        if denied is None and _full(lease.limits, self._held[lease.owner]):
            denied, wait = CONCURRENCY, BUSY_SECONDS
        if denied is None:
            self._take(lease, now)
        return Verdict(denied, wait, self._levels(lease, now))

    def record(self, lease: Lease) -> None:
        """Take the cost of ``lease`` without a check, because Redis granted the lease."""
        self._take(lease, time.monotonic())

    def end(self, lease: Lease) -> None:
        """Release the lease's concurrency and settle its cost."""
        self._held[lease.owner] -= 1
        if (more := lease.more) != NOTHING:
            self._charge(lease, more, time.monotonic())

    def _take(self, lease: Lease, now: float) -> None:
        self._charge(lease, lease.cost, now)
        self._held[lease.owner] += 1

    def _charge(self, lease: Lease, amounts: Cost, now: float) -> None:
        for name, limit, amount in zip(RATES, lease.limits.rates, amounts, strict=True):
            if limit is not None:
                begin = max(now, self._whole_at.get((lease.owner, name), now))
                self._whole_at[lease.owner, name] = begin + amount * MINUTE / limit

    def _shortage(self, lease: Lease, now: float) -> tuple[str | None, float]:
        """Return the rate with the longest wait, and the wait in seconds; None and 0 if no rate denies the request."""
        denied, longest = None, 0.0
        for name, limit, amount in zip(RATES, lease.limits.rates, lease.cost, strict=True):
            if limit is not None:
                ahead = max(0.0, self._whole_at.get((lease.owner, name), now) - now)
                wait = ahead + (amount - limit) * MINUTE / limit
                if wait > max(longest, 1e-6):
                    denied, longest = name, wait
        return denied, longest

    def _levels(self, lease: Lease, now: float) -> tuple[Level | None, Level | None, Level | None]:
        requests, tokens, items = (
            None if limit is None else level(limit, self._whole_at.get((lease.owner, name), now) - now)
            for name, limit in zip(RATES, lease.limits.rates, strict=True)
        )
        return requests, tokens, items


def _full(limits: Limits, held: int) -> bool:
    return limits.concurrency is not None and held >= limits.concurrency
