"""Jobs that wait for a text worker: a queue that is bounded, and fair between tenants by the time that their jobs take.

Each tenant has a virtual time: the seconds of workers that it used, divided by its weight. The next job is one of the tenant with
the lowest virtual time. A job adds its estimated cost when it begins, and the difference from the real one when it ends. A tenant
that was idle begins at the queue's virtual time, that of the job which began last, so it saves up nothing. This is start-time fair
queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with costs that are corrected afterwards, as in the virtual token counter of Sheng et
al. (OSDI 2024).

Bulk jobs have a class of their own, so that they may wait while others pass: they may have half of the workers.
"""

from __future__ import annotations

import time
from asyncio import Future
from collections import deque
from dataclasses import dataclass
from typing import Any

from yardstick_llm.gateway.errors import Overloaded

LEAST_COST = 4 << 10
"""Lowest estimate of the cost of a job, in bytes."""
SECONDS_PER_BYTE = 0.8e-6
"""Time of a worker, by which the cost of a job is estimated until it has ended."""
_REMEMBERED = 1024
"""Number of known tenants above which tenants without a debt are forgotten."""


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


@dataclass(eq=False, slots=True)
class QueuedJob:
    """A job that has a worker or waits for one."""

    tenant: str
    size: int
    """Bytes of its body."""
    bulk: bool = False
    """Whether it is large, or its time is not bounded by its size."""
    weight: float = 1.0
    ready: Future[Any] | None = None
    """The job's worker, if it has to wait. Cancelled as soon as the job's task is, before the task itself notices."""
    began: float = 0.0
    """When it got its worker, on the clock of :func:`time.perf_counter`."""
    number: int = 0
    """Its place in the order in which jobs arrived."""

    @property
    def estimate(self) -> float:
        """Seconds that it is expected to take."""
        return max(self.size, LEAST_COST) * SECONDS_PER_BYTE


class JobQueue:
    """Orders the jobs, and counts the bulk jobs that have a worker."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._waiting: dict[bool, dict[str, deque[QueuedJob]]] = {False: {}, True: {}}
        """By class, bulk or not, and tenant."""
        self._used: dict[str, float] = {}
        """Virtual times."""
        self._virtual = 0.0
        self._pushed = self._length = self._bytes = 0
        self._bulk_running = 0
        self._bulk_workers = max(1, capacity.workers // 2)

    def __len__(self) -> int:
        return self._length

    def push(self, job: QueuedJob) -> None:
        """Add a job. Raises :class:`Overloaded` if the queue is full."""
        full = self._length >= self._capacity.max_jobs or self._bytes + job.size > self._capacity.max_bytes
        if full and self._length:
            raise Overloaded("The queue of requests to tokenise is full; try again soon.", retry_after=1)
        if not any(job.tenant in waiting for waiting in self._waiting.values()):
            self._used[job.tenant] = max(self._virtual, self._used.get(job.tenant, 0.0))
        job.number = self._pushed = self._pushed + 1
        self._waiting[job.bulk].setdefault(job.tenant, deque()).append(job)
        self._length += 1
        self._bytes += job.size

    def passes(self, job: QueuedJob) -> bool:
        """Return whether a job may have an idle worker without waiting, and if so, count it as :meth:`push` and :meth:`pop` do."""
        if self._length or (job.bulk and self._bulk_running >= self._bulk_workers):
            return False
        self._used[job.tenant] = max(self._virtual, self._used.get(job.tenant, 0.0))
        self._begun(job)
        return True

    def pop(self) -> QueuedJob | None:
        """Remove and return the next job that may have a worker; None if there is none. Jobs that were cancelled are left out."""
        classes = (False, True) if self._bulk_running < self._bulk_workers else (False,)
        while jobs := [waiting[0] for of in classes for waiting in self._waiting[of].values()]:
            job = min(jobs, key=lambda job: (self._used[job.tenant], job.number))
            self.discard(job)
            if job.ready is None or not job.ready.cancelled():
                self._begun(job)
                return job
        return None

    def discard(self, job: QueuedJob) -> None:
        """Remove a job, if it waits."""
        waiting = self._waiting[job.bulk]
        if job in waiting.get(job.tenant, ()):
            waiting[job.tenant].remove(job)
            self._length -= 1
            self._bytes -= job.size
            if not waiting[job.tenant]:
                del waiting[job.tenant]

    def ended(self, job: QueuedJob) -> None:
        """Record that a job which had a worker has ended, and charge its tenant the time that it took."""
        self._bulk_running -= job.bulk
        more = time.perf_counter() - job.began - job.estimate
        self._used[job.tenant] = self._used.get(job.tenant, self._virtual) + more / job.weight

    def _begun(self, job: QueuedJob) -> None:
        self._bulk_running += job.bulk
        job.began = time.perf_counter()
        self._virtual = max(self._virtual, self._used[job.tenant])
        self._used[job.tenant] += job.estimate / job.weight
        if len(self._used) > _REMEMBERED:
            waits = self._waiting[False].keys() | self._waiting[True].keys()
            self._used = {tenant: used for tenant, used in self._used.items() if used > self._virtual or tenant in waits}
