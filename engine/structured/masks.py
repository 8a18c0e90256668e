"""Computes masks in threads while the loop goes on.

A sequence whose mask is not ready waits for a later step, so a grammar with slow masks delays no other tenant: its masks are
computed by threads that only slow ones share, in a fair order between tenants, and the loop waits a bounded time for the others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial

from engine import wire
from engine.structured.constraint import Constraint
from engine.structured.fair_threads import FairThreads

QUICK_SECONDS = 0.005
"""Longest time that a step waits for masks, unless steps are long."""
QUICK_SHARE = 0.1
"""Longest time that a step waits for masks, as a share of the last step: a sequence that misses a long step loses more."""
SLOW_MASK_SECONDS = 0.001
"""A sequence with a mask that took longer than this is slow from then on."""
_MOST_THREADS = 8
_SLOW_THREADS = 2


class MaskThreads:
    """The threads that compute masks. Used by one thread only."""

    def __init__(self, threads: int | None = None) -> None:
        """``threads``: None for one on each processor, at least 2 and at most 8."""
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        count = threads or min(_MOST_THREADS, max(2, processors))
        self._parts = max(1, count - 1)  # one thread stays free of a tenant whose masks become slow
        self._quick = FairThreads(count, "grammar-masks", self._parts)
        self._slow = FairThreads(_SLOW_THREADS, "grammar-slow-masks")
        self._waited: list[Future[None]] = []
        """Quick masks that the next step waits for."""

    def start(self, constraints: Sequence[tuple[wire.Caller, Constraint]]) -> None:
        """Compute the masks of ``constraints``, which have just advanced."""
        quick: dict[str, tuple[wire.Caller, list[Constraint]]] = {}
        slow: list[tuple[wire.Caller, Constraint]] = []
        for caller, constraint in constraints:  # divided before any thread begins, which may make one slow
            if constraint.seconds > SLOW_MASK_SECONDS:
                slow.append((caller, constraint))
            else:
                quick.setdefault(caller.tenant, (caller, []))[1].append(constraint)
        for caller, each in quick.values():
            parts = [part for place in range(self._parts) if (part := each[place :: self._parts])]
            self._waited += [self._quick.submit(caller, partial(_compute, part)) for part in parts]
        for caller, constraint in slow:
            self._slow.submit(caller, constraint.compute_mask)

    def wait(self, step_seconds: float) -> None:
        """Wait for the quick masks that were started since the last call, as long as :data:`QUICK_SECONDS` and
        :data:`QUICK_SHARE` allow for steps of ``step_seconds``."""
        if self._waited:
            wait(self._waited, max(QUICK_SECONDS, QUICK_SHARE * step_seconds))
            self._waited = []

    def close(self) -> None:
        """End the threads."""
        for threads in (self._quick, self._slow):
            threads.close()


def _compute(constraints: Sequence[Constraint]) -> None:
    for constraint in constraints:
        constraint.compute_mask()
