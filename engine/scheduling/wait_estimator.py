"""Estimate of the time that a new request waits: the tokens before it, at the pace at which the queue has been moving.

The pace is the number of tokens begun in each second, in steps during which requests waited. Only then is the engine as fast as it
can be, whatever slows it down. The last ten seconds count most.

A tenant waits for its own requests only, at its share of the pace: while its queue of Q tokens is served, another tenant gets at
most Q tokens times the ratio of their weights, and no more than it has queued (generalised processor sharing).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.requests.core import Request
from engine.scheduling.flow import clamped

HALF_LIFE = 10.0
"""Seconds of waiting after which what was seen counts for half."""


@dataclass(slots=True)
class Queued:
    """Queue of one tenant."""

    weight: float
    tokens: Counter[int] = field(default_factory=Counter)
    """Queued tokens by priority."""
    total: int = 0


class WaitEstimator:
    """Estimates queue time from the waiting requests and the pace of the queue."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds, monotonic."""
        self._clock = clock
        self._sizes: dict[str, tuple[int, int]] = {}
        """Priority and tokens of each waiting request, by id."""
        self._tokens: Counter[int] = Counter()
        """Waiting tokens by priority."""
        self._queued: dict[str, Queued] = {}
        """Queues by tenant. A tenant with nothing queued has no entry."""
        self._turned: float | None = None
        """Time of the last scheduled step, if requests were waiting after it."""
        self._begun = 0
        """Tokens begun since that step."""
        self._moved, self._seconds = 0.0, 0.0

    def add(self, request: Request) -> None:
        """Count a request that begins to wait."""
        priority, tokens, caller = clamped(request.priority), request.size, request.caller
        self._sizes[request.id] = priority, tokens
        self._tokens[priority] += tokens
        queued = self._queued.get(caller.tenant)
        if queued is None:
            queued = self._queued[caller.tenant] = Queued(caller.weight)
        queued.weight = caller.weight
        queued.tokens[priority] += tokens
        queued.total += tokens

    def begin(self, request: Request, tokens: int) -> None:
        """Count ``tokens`` of a waiting request as begun."""
        self._begun += self._take(request, tokens)

    def remove(self, request: Request) -> None:
        """Stop counting a request that has ended."""
        self._take(request, request.size)

    def _take(self, request: Request, tokens: int) -> int:
        """Count up to ``tokens`` less. Return how many."""
        priority, left = self._sizes.get(request.id, (0, 0))
        tokens = min(tokens, left)
        if not tokens:
            return 0
        self._sizes[request.id] = priority, left - tokens
        if tokens == left:
            del self._sizes[request.id]
        queued = self._queued[request.caller.tenant]
        for counter in (self._tokens, queued.tokens):
            counter[priority] -= tokens
            if not counter[priority]:
                del counter[priority]
        queued.total -= tokens
        if not queued.total:
            del self._queued[request.caller.tenant]
        return tokens

    def turn(self) -> None:
        """Update the pace after a step was scheduled."""
        now = self._clock()
        if self._turned is not None:
            kept = 0.5 ** ((now - self._turned) / HALF_LIFE)
            self._moved = kept * self._moved + self._begun
            self._seconds = kept * self._seconds + now - self._turned
        self._turned = now if self._sizes else None
        self._begun = 0

    def seconds(self, priority: int, tenant: str = "") -> float:
        """Expected queue time of a request of this tenant and priority. Before anything has moved: the time that others have
        waited.

        Requests of a higher priority number count as behind it, though old ones may have aged past it.
        """
        mine = self._queued.get(tenant)
        if mine is None:
            return 0.0
        ahead = _up_to(mine.tokens, clamped(priority))
        others = sum(
            min(queued.total, ahead * queued.weight / mine.weight) for queued in self._queued.values() if queued is not mine
        )
        return self._duration(ahead, ahead + others)

    def longest(self) -> float:
        """Expected queue time of a request of priority 0, of the tenant for which it is longest."""
        ahead = _up_to(self._tokens, 0)
        return self._duration(ahead, ahead)

    def _duration(self, ahead: float, tokens: float) -> float:
        if not ahead:
            return 0.0
        return tokens * self._seconds / self._moved if self._moved else self._seconds


def _up_to(tokens: Counter[int], priority: int) -> int:
    return sum(count for other, count in tokens.items() if other <= priority)
