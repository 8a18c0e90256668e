"""Jobs that wait for a text worker: a queue that is fair between tenants and bounded in jobs and bytes."""

from __future__ import annotations

import time
from asyncio import Future
from dataclasses import dataclass

from gateway.errors import Overloaded
from gateway.workers.channel import Channel
from gateway.workers.fair import FairJobQueue

LEAST_COST = 4 << 10
"""Lowest estimate of the cost of a job, in bytes."""
SECONDS_PER_BYTE = 0.8e-6
"""Time of a worker, by which the cost of a job is estimated until it has ended."""


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
    ready: Future[Channel] | None = None
    """The job's worker, if it has to wait. Cancelled as soon as the job's task is, before the task itself notices."""
    began: float = 0.0
    """When it got its worker, on the clock of :func:`time.perf_counter`."""

    @property
    def estimate(self) -> float:
        """Seconds that it is expected to take."""
        return max(self.size, LEAST_COST) * SECONDS_PER_BYTE


class JobQueue:
    """Orders the jobs, and counts the bulk jobs that have a worker: they may have half of the workers."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._queue: FairJobQueue[QueuedJob] = FairJobQueue()
        self._bytes = 0
        self._bulk_running = 0
        self._bulk_workers = max(1, capacity.workers // 2)

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, job: QueuedJob) -> None:
        """Add a job. Raises :class:`Overloaded` if the queue is full."""
        full = len(self._queue) >= self._capacity.max_jobs or self._bytes + job.size > self._capacity.max_bytes
        if full and self._queue:
            raise Overloaded("The queue of requests to tokenise is full; try again soon.", retry_after=1)
        self._queue.push(job, tenant=job.tenant, cost=job.estimate, weight=job.weight, bulk=job.bulk)
        self._bytes += job.size

    def passes(self, job: QueuedJob) -> bool:
        """Return whether a job may have an idle worker without waiting, and if so, count it as :meth:`push` and :meth:`pop` do."""
        if len(self._queue) or (job.bulk and self._bulk_running >= self._bulk_workers):
            return False
        self._queue.passed(tenant=job.tenant, cost=job.estimate, weight=job.weight)
        self._begun(job)
        return True

    def pop(self) -> QueuedJob | None:
        """Remove and return the next job that may have a worker; None if there is none. Jobs that were cancelled are left out."""
        while job := self._queue.pop(bulk=self._bulk_running < self._bulk_workers):
            if job.ready is None or not job.ready.cancelled():
                self._bytes -= job.size
                self._begun(job)
                return job
        return None

    def discard(self, job: QueuedJob) -> None:
        """Remove a job that got no worker, once."""
        self._queue.discard(job)
        self._bytes -= job.size

    def ended(self, job: QueuedJob) -> None:
        """Record that a job which had a worker has ended, and charge its tenant the time that it took."""
        self._bulk_running -= job.bulk
        more = time.perf_counter() - job.began - job.estimate
        self._queue.corrected(tenant=job.tenant, more=more, weight=job.weight)

    def _begun(self, job: QueuedJob) -> None:
        self._bulk_running += job.bulk
        job.began = time.perf_counter()
