"""Circuit breaker of one replica: repeated failures eject it for a while, then one trial request decides."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

LONGEST_SECONDS = 60.0
"""Longest nominal ejection, before jitter."""


@dataclass(slots=True)
class Health:
    """A replica is in use, ejected (until :attr:`returns`), or half open (from then until a trial request ends)."""

    tolerance: int = 3
    """Consecutive failures that eject a replica."""
    seconds: float = 5.0
    """Length of the first ejection, in seconds; each failed trial doubles it."""
    failures: int = 0
    """Consecutive failures."""
    races_lost: int = 0
    """Requests that another replica answered first, though it got them later; since the last answer in time."""
    ejections: int = 0
    """Consecutive ejections, with no answer in time between them."""
    returns: float | None = None
    """Time at which the next trial may begin, on the monotonic clock; None while the replica is in use."""

    @property
    def ejected(self) -> bool:
        """Whether the replica is ejected now."""
        return self.returns is not None and time.monotonic() < self.returns

    @property
    def half_open(self) -> bool:
        """Whether a trial is due or running."""
        return self.returns is not None and time.monotonic() >= self.returns

    @property
    def slow(self) -> bool:
        """Whether an ejection is due to lost races and not to failures."""
        return self.races_lost >= self.tolerance > self.failures

    def succeeded(self, *, late: bool = False) -> None:
        """Record an answered request. A ``late`` answer (:mod:`gateway.pool.hedging`) does not end an ejection after lost races."""
        self.failures = 0
        if not late:
            self.races_lost = self.ejections = 0
        if not self.races_lost:
            self.returns = None

    def failed(self) -> bool:
        """Record a failure that is the replica's fault. Returns whether it ejected the replica."""
        self.failures += 1
        return self._eject(self.failures)

    def beaten(self) -> bool:
        """Record that another replica was faster. Returns whether it ejected the replica."""
        self.races_lost += 1
        return self._eject(self.races_lost)

    def forgive(self) -> None:
        """End an ejection that lost races caused."""
        if self.slow:
            self.returns = None
        self.races_lost = 0

    def _eject(self, count: int) -> bool:
        if self.ejected or (count < self.tolerance and not self.half_open):
            return False
        wait = min(self.seconds * 2**self.ejections, LONGEST_SECONDS)
        self.returns = time.monotonic() + wait * random.uniform(0.8, 1.2)
        self.ejections += 1
        return True
