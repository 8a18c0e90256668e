"""What the results of its requests say about a replica: one that keeps failing is left alone for a while, then tried again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

LONGEST_SECONDS = 60.0
"""A replica that fails every trial is tried again at least this often."""


@dataclass(slots=True)
class Health:
    """In use, ejected (until :attr:`returns`), or half open: after that, until the one request that it then gets is answered."""

    tolerance: int = 3
    """Failures in a row that eject a replica."""
    seconds: float = 5.0
    """How long it is left alone the first time; each failed trial doubles it."""
    failures: int = 0
    """In a row."""
    ejections: int = 0
    """In a row, with no success between them."""
    returns: float | None = None
    """When the next trial may begin, by the monotonic clock; None: in use."""

    @property
    def ejected(self) -> bool:
        """Whether it is left alone now."""
        return self.returns is not None and time.monotonic() < self.returns

    @property
    def half_open(self) -> bool:
        """Whether a trial is due or running."""
        return self.returns is not None and time.monotonic() >= self.returns

    def succeeded(self) -> None:
        """A request was answered."""
        self.failures = self.ejections = 0
        self.returns = None

    def failed(self) -> bool:
        """A request failed by the replica's fault. Returns whether that ejected it."""
        self.failures += 1
        if self.ejected or (self.failures < self.tolerance and not self.half_open):
            return False
        wait = min(self.seconds * 2**self.ejections, LONGEST_SECONDS)
        self.returns = time.monotonic() + wait * random.uniform(0.8, 1.2)
        self.ejections += 1
        return True
