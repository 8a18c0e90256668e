"""A flow: the requests of one tenant, waiting and running, in the order of the tenant."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.requests.core import Request

AGING_SECONDS = 5.0
"""A request of priority p is served like one of priority 0 that arrived p times this later."""
MAX_PRIORITY = 10
"""Priorities beyond ±this value count as this value, so no request overtakes one that arrived more than 100 s before it."""


def clamped(priority: int) -> int:
    """``priority`` within :data:`MAX_PRIORITY`."""
    return min(max(priority, -MAX_PRIORITY), MAX_PRIORITY)


def rank(request: Request) -> float:
    """Sort key of a request within its tenant, lowest first.

    It never changes. Requests still age, because each second newer requests get a rank that is higher by one.
    """
    return request.received + AGING_SECONDS * clamped(request.priority)


@dataclass(eq=False, slots=True)
class Flow:
    """The requests of one tenant."""

    tenant: str
    number: int
    """Order of creation."""
    held: list[int]
    """[KV pool] slots that its running requests took from the pool."""
    weight: float
    """Weight of its latest request."""
    virtual: float
    waiting: list[tuple[float, int, Request]] = field(default_factory=list)
    """Waiting requests by rank and arrival."""
    waiting_tokens: int = 0
    """Tokens of the waiting requests, before any is found in the prefix cache."""
    running: dict[int, Request] = field(default_factory=dict)
    """By arrival, in order of admission."""
    reserved: int = 0
    """Tokens of this step for its decoding branches."""
    room: int = 0
    """Rest of its share of this step's other tokens."""
    spent: int = 0
    """Tokens that this step computes for it."""
    ready: bool = False
    """Whether the queue has it among the flows that only wait."""

    def demand(self, limit: int) -> int:
        """Tokens that it could use in a step beside its decoding branches, counted up to ``limit``."""
        total = self.waiting_tokens
        for request in self.running.values():
            if total >= limit:
                return limit
            total += _prompt_remaining(request, limit - total)
        return min(total, limit)

    @property
    def holding(self) -> float:
        """Slots that it holds, relative to its weight."""
        return sum(self.held) / self.weight

    @property
    def oldest(self) -> Request | None:
        """The running request that was admitted first: no other flow takes its slots or its place."""
        return next(iter(self.running.values()), None)

    @property
    def newest_waiting(self) -> Request | None:
        """The last waiting request that has not begun; those that have begun were preempted, and continue later."""
        return next((request for _, _, request in reversed(self.waiting) if not request.begun), None)


def _prompt_remaining(request: Request, limit: int) -> int:
    """Tokens of a running request that are neither computed nor reserved for decoding, counted at least up to ``limit``."""
    total, limit = 0, limit + request.reserve
    for part in request.with_aux:
        total += part.prefix_remaining
        for branch in part.branches:
            if total >= limit:
                break
            total += branch.remaining
    return max(0, total - request.reserve)
