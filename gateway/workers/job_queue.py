"""Jobs that wait for a text worker: a queue that is fair between tenants and bounded in jobs and bytes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gateway.errors import Overloaded
from gateway.workers.channel import Channel
from gateway.workers.fair import FairJobQueue

LEAST_COST = 4 << 10
"""Lowest cost of a job in the fair queue, in bytes."""


@dataclass(frozen=True)
class Capacity:
    """Bounds on the workers and their queue."""

    workers: int
    job_mib: int
    """Memory limit of one job, in MiB."""
    max_jobs: int
    """Most jobs that wait for a worker at a time."""
    max_bytes: int
    """Most bytes of the bodies of those jobs."""
    short_texts: bool = True
    """Whether the event loop reads short texts by itself."""


@dataclass(eq=False)
class Waiter:
    """A job without a worker. ``size``: bytes of its body."""

    size: int
    bulk: bool
    ready: asyncio.Future[Channel] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The job's worker. Cancelled as soon as the job's task is, before the task itself notices."""


class JobQueue:
    """Orders the jobs, and counts the bulk jobs that have a worker: they may have half of the workers."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._queue: FairJobQueue[Waiter] = FairJobQueue()
        self._bytes = 0
        self._bulk_running = 0
        self._bulk_workers = max(1, capacity.workers // 2)

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, waiter: Waiter, tenant: str, weight: float) -> None:
        """Add a job. Raises :class:`Overloaded` if the queue is full."""
        full = len(self._queue) >= self._capacity.max_jobs or self._bytes + waiter.size > self._capacity.max_bytes
        if full and self._queue:
            raise Overloaded("The queue of requests to tokenise is full; try again soon.", retry_after=1)
        self._queue.push(waiter, tenant=tenant, cost=max(waiter.size, LEAST_COST), weight=weight, bulk=waiter.bulk)
        self._bytes += waiter.size

    def passes(self, size: int, tenant: str, weight: float, *, bulk: bool) -> bool:
        """Return whether a job may have an idle worker without waiting, and if so, count it as :meth:`push` and :meth:`pop` do."""
        if len(self._queue) or (bulk and self._bulk_running >= self._bulk_workers):
            return False
        self._queue.passed(tenant=tenant, cost=max(size, LEAST_COST), weight=weight)
        self._bulk_running += bulk
        return True

    def pop(self) -> Waiter | None:
        """Remove and return the next job that may have a worker; None if there is none. Jobs that were cancelled are left out."""
        while waiter := self._queue.pop(bulk=self._bulk_running < self._bulk_workers):
            if not waiter.ready.cancelled():
                self._bytes -= waiter.size
                self._bulk_running += waiter.bulk
                return waiter
        return None

    def discard(self, waiter: Waiter) -> None:
        """Remove a job that got no worker, once."""
        self._queue.discard(waiter)
        self._bytes -= waiter.size

    def ended(self, *, bulk: bool) -> None:
        """Record that a job which had a worker has ended."""
        self._bulk_running -= bulk
