"""Computes masks in threads while the loop goes on.

A sequence whose mask is not ready waits for a later step, so a grammar with slow masks delays no other sequence: its masks are
computed by a thread that only slow ones share, and the loop waits a bounded time for the others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from engine.structured.constraint import Constraint

QUICK_SECONDS = 0.005
"""Longest time that a step waits for masks, unless steps are long."""
QUICK_SHARE = 0.1
"""Longest time that a step waits for masks, as a share of the last step: a sequence that misses a long step loses more."""
SLOW_MASK_SECONDS = 0.001
"""A sequence with a mask that took longer than this is slow from then on."""
_MOST_THREADS = 8


class MaskThreads:
    """The threads that compute masks. Used by one thread only."""

    def __init__(self, threads: int | None = None) -> None:
        """``threads``: None for one on each processor, at most 8."""
        self._count = threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
        self._quick = ThreadPoolExecutor(self._count, "grammar-masks")
        self._slow = ThreadPoolExecutor(1, "grammar-slow-masks")
        self._waited: list[Future[None]] = []
        """Quick masks that the next step waits for."""

    def start(self, constraints: Sequence[Constraint]) -> None:
        """Compute the masks of ``constraints``, which have just advanced."""
        quick: list[Constraint] = []
        slow: list[Constraint] = []
        for constraint in constraints:  # divided before any thread begins, which may make one slow
            (slow if constraint.seconds > SLOW_MASK_SECONDS else quick).append(constraint)
        parts = [part for place in range(self._count) if (part := quick[place :: self._count])]
        self._waited += [self._quick.submit(_compute, part) for part in parts]
        for constraint in slow:
            self._slow.submit(constraint.compute_mask)

    def wait(self, step_seconds: float) -> None:
        """Wait for the quick masks that were started since the last call, as long as :data:`QUICK_SECONDS` and
        :data:`QUICK_SHARE` allow for steps of ``step_seconds``."""
        if self._waited:
            wait(self._waited, max(QUICK_SECONDS, QUICK_SHARE * step_seconds))
            self._waited = []

    def close(self) -> None:
        """End the threads."""
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)


def _compute(constraints: Sequence[Constraint]) -> None:
    for constraint in constraints:
        constraint.compute_mask()
