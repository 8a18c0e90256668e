"""Who runs next: one token budget a step, shared by scoring and decoding.

Running requests come first, in order of admission: each decoding branch gets its one token, prompts and items get what the
budget leaves. Then waiting requests are admitted by priority and arrival. A running request that finds no free slot takes them
from the prefix cache, then from whoever was admitted last; what was taken is computed again later. A waiting request takes from
the cache only. So the oldest request always gets on, and nothing waits for ever. Neither kind of work starves the other: every
sequence being generated gets its token in every step, and prompts and items get at least a :data:`PREFILL_SHARE` of the budget.

A step may be scheduled while the one before is still being computed. Branches whose result is on its way then wait, or, where
running ahead is asked for and the token being drawn does not matter to the scheduler, go on from a token not known yet. Slots are
given back and taken again without waiting for steps in flight: what a later step writes, it writes later.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.core import EMPTY, PENDING, Batch, Branch, GenerateRequest, Ints, Request, Run
from engine.memory.prefix_cache import PrefixCache
from engine.memory.slots import SlotPool

PREFILL_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Budget:
    """What bounds a step."""

    tokens: int
    """Tokens a step, decoding branches included."""
    running: int
    """Requests admitted at once."""


class Scheduler:
    """Turns requests into batches. It gives and takes every slot; it knows neither tensors nor clients."""

    def __init__(
        self, pool: SlotPool, budget: Budget, clock: Callable[[], float] = time.monotonic, *, run_ahead: bool = False
    ) -> None:
        self.pool = pool
        self._run_ahead = run_ahead
        self.cache = PrefixCache(pool)
        self._budget = budget
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._waiting: list[tuple[int, int, Request]] = []
        """A heap; entries of requests that have ended are skipped."""
        self._expiring: list[tuple[float, int, Request]] = []

    def add(self, request: Request) -> None:
        """Queue a request that has been checked; its id is not in use."""
        self._requests[request.id] = request
        self._enqueue(request)
        if request.expires is not None:
            heapq.heappush(self._expiring, (request.expires, request.arrival, request))

    def get(self, request_id: str) -> Request | None:
        """The request of that id, if it has not ended."""
        return self._requests.get(request_id)

    @property
    def idle(self) -> bool:
        """Whether there is no request."""
        return not self._requests

    @property
    def requests(self) -> list[Request]:
        """All that have not ended, in order of arrival."""
        return list(self._requests.values())

    @property
    def running(self) -> list[Request]:
        """Those admitted, in that order."""
        return list(self._running.values())

    @property
    def waiting(self) -> int:
        """How many are not admitted."""
        return len(self._requests) - len(self._running)

    def expire(self) -> list[Request]:
        """Forget the requests whose deadline passed before they were computed; returns them. Generations that have begun go on."""
        late = []
        while self._expiring and self._expiring[0][0] <= self._clock():
            request = heapq.heappop(self._expiring)[2]
            if self._requests.get(request.id) is request and request.droppable:
                self.remove(request)
                late.append(request)
        return late

    def schedule(self) -> Batch:
        """The next step; empty only when there is nothing to do."""
        batch = Batch()
        reserved = sum(request.reserve for request in self._running.values())
        most = max(self._budget.tokens, reserved + int(PREFILL_SHARE * self._budget.tokens))
        for request in self.running:
            if request.id in self._running:
                reserved -= request.reserve
                self._compute(batch, request, most - batch.tokens - reserved, may_preempt=True)
        while self._waiting and batch.tokens < most and len(self._running) < self._budget.running:
            _, _, request = heapq.heappop(self._waiting)
            if self._requests.get(request.id) is request and not self._admit(batch, request, most):
                break
        return batch

    def finish(self, branch: Branch) -> None:
        """A branch is done. What a generation computed stays in the prefix cache; nobody will ask for an item again."""
        request = branch.request
        request.branches.remove(branch)
        branch.done = True
        if isinstance(request, GenerateRequest) and request.node is not None:
            self.cache.adopt(request.node, branch.tokens.view[: len(branch.slots)], branch.slots.view)
        else:
            self.pool.release(branch.slots.view)
        branch.slots.clear()
        if not request.branches:
            self.remove(request)

    def remove(self, request: Request) -> None:
        """Forget a request and take back what it holds."""
        del self._requests[request.id]
        self._let_go(request)

    def fail(self, batch: Batch) -> list[Request]:
        """A step failed: forget its requests, and what it was to have put into the prefix cache.

        Returns those requests; some of the batch may have ended since.
        """
        there = (run.request for run in batch.runs if self._requests.get(run.request.id) is run.request)
        failed = list(dict.fromkeys(there))
        for request in failed:
            self.remove(request)
        self.cache.clear()
        return failed

    def _enqueue(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.priority, request.arrival, request))

    def _admit(self, batch: Batch, request: Request, most: int) -> bool:
        """Start a waiting request if anything of it fits into a step of at most ``most`` tokens."""
        self._running[request.id] = request
        request.node = self.cache.root
        before = batch.tokens
        self._compute(batch, request, most - before, may_preempt=False)
        if batch.tokens == before:
            self._preempt(request)
            return False
        request.begun = True
        return True

    def _compute(self, batch: Batch, request: Request, room: int, *, may_preempt: bool) -> None:
        """Put up to ``room`` tokens of ``request`` into the step, and at least one of each sequence that is being generated."""
        limit = batch.tokens + room
        least = 1 if request.reserve else 0
        self._compute_prefix(batch, request, room, may_preempt=may_preempt)
        if request.prefix_remaining:
            return
        for branch in request.branches:
            if not self._can_go_on(request, branch):
                continue
            count = min(branch.remaining, max(limit - batch.tokens, least))
            slots = self._allocate(count, request, branch, may_preempt=may_preempt) if count > 0 else EMPTY
            if not len(slots):
                return
            start = len(branch.slots)
            branch.slots.extend(slots)
            context = np.concatenate([request.prefix_slots.view, branch.slots.view])
            batch.add(Run(request, branch, branch.tokens.view[start : start + count], context))
            request.computed_tokens += count

    def _can_go_on(self, request: Request, branch: Branch) -> bool:
        """Whether there is something to compute for ``branch`` now; a token being drawn is entered as not known yet."""
        if branch.flights and not branch.pending:
            if not (self._run_ahead and request.may_run_ahead(branch)):
                return False
            branch.tokens.extend([PENDING])
        return branch.remaining > 0

    def _compute_prefix(self, batch: Batch, request: Request, room: int, *, may_preempt: bool) -> None:
        """Take what the cache has by now of the rest of the prefix, compute up to ``room`` tokens of what it lacks."""
        assert request.node is not None
        if not request.prefix_remaining:
            return
        request.node, found = self.cache.advance(request.node, request.prefix[len(request.prefix_slots) :])
        request.prefix_slots.extend(found)
        if not request.begun:
            request.cached_tokens += len(found)
        count = min(request.prefix_remaining, room)
        slots = self._allocate(count, request, None, may_preempt=may_preempt) if count > 0 else EMPTY
        if not len(slots):
            return
        start = len(request.prefix_slots)
        tokens = request.prefix[start : start + count]
        request.node = self.cache.extend(request.node, tokens, slots)
        request.prefix_slots.extend(slots)
        batch.add(Run(request, None, tokens, request.prefix_slots.view))
        request.computed_tokens += count

    def _allocate(self, count: int, request: Request, branch: Branch | None, *, may_preempt: bool) -> Ints:
        """``count`` slots for ``branch`` (None: the prefix), or none at all."""
        while self.pool.free < count:
            if self.cache.evict(count - self.pool.free):
                continue
            if not (may_preempt and self._preempt_behind(request, branch)):
                return EMPTY
        return self.pool.allocate(count)

    def _preempt_behind(self, request: Request, branch: Branch | None) -> bool:
        """Take the slots of whoever comes last, if that is not ``branch`` itself. Nobody behind it is in this step yet."""
        last = next(reversed(self._running.values()))
        if last is not request:
            self._preempt(last)
            return True
        for other in reversed(request.branches):
            if other is branch:
                return False
            if len(other.slots):
                self._strip(other)
                return True
        return False

    def _preempt(self, request: Request) -> None:
        """Back to the queue, in front of all that arrived later."""
        self._let_go(request)
        if not request.begun:
            request.cached_tokens = 0
        self._enqueue(request)

    def _let_go(self, request: Request) -> None:
        """Take back all slots and the place among the running."""
        for branch in request.branches:
            self._strip(branch)
        if request.node is not None:
            self.cache.release(request.node)
            request.node = None
        request.prefix_slots.clear()
        self._running.pop(request.id, None)

    def _strip(self, branch: Branch) -> None:
        self.pool.release(branch.slots.view)
        branch.slots.clear()
        if not len(branch.outputs):
            branch.prompt_logprobs.clear()
