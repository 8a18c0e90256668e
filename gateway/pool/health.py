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
    ejections: int = 0
    """Consecutive ejections, with no success between them."""
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

    def succeeded(self) -> None:
        """Record an answered request."""
        self.failures = self.ejections = 0
        self.returns = None

    def failed(self) -> bool:
        """Record a failure that is the replica's fault. Returns whether it ejected the replica."""
        self.failures += 1
        if self.ejected or (self.failures < self.tolerance and not self.half_open):
            return False
        wait = min(self.seconds * 2**self.ejections, LONGEST_SECONDS)
        self.returns = time.monotonic() + wait * random.uniform(0.8, 1.2)
        self.ejections += 1
        return True
