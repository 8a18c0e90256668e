"""Fills each step with tokens, up to one budget that scoring and decoding share.

Order within a tenant: running requests come first, in order of admission. Each decoding branch gets its one token; prompts and
items get the rest of the budget. Waiting requests are admitted in the order of :func:`~engine.scheduling.flow.rank`, which is the
time of arrival, corrected by priority. A running request that finds no free slot evicts from the prefix cache, then preempts the
request that was admitted last; the preempted tokens are computed again later. A waiting request only evicts from the cache. So the
oldest request always progresses. Neither scoring nor decoding starves: every generated sequence gets its token in every step, and
prompts and items get at least a :data:`PREFILL_SHARE` of the budget.

Between tenants, resources are divided by weight:

- *Tokens of a step*: :mod:`engine.scheduling.fair_queue` divides the tokens that decoding leaves. Tokens that a tenant cannot use
  go to the others.
- *Length of a step*: while several tenants share the engine, steps have a :data:`CONTENDED_SHARE` of the budget, because a new
  request waits for the step in progress, and a flood of requests fills every step.
- *Running requests and slots*: a tenant takes them from requests of tenants that have more for their weight
  (:mod:`engine.scheduling.preemption`). While several tenants share the engine, each leaves room for the others
  (:data:`DYNAMIC_THRESHOLD`), so most requests need no preemption.
- *Queue places*: see :meth:`Scheduler.displace`.

With one tenant none of these rules applies.

The scheduler chooses requests. :mod:`engine.scheduling.composer` adds their tokens to the step, and
:mod:`engine.scheduling.allocation` allocates and frees their slots. A length model has its own slots and prefix cache.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine import wire
from engine.batch import Batch, CandidatePass
from engine.core import Branch, GenerateRequest, Request
from engine.kvcache.prefix_cache import PrefixCache
from engine.kvcache.slots import SlotPool
from engine.scheduling.allocation import Allocator, KVPool
from engine.scheduling.composer import StepComposer
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.flow import Flow
from engine.scheduling.wait_estimator import WaitEstimator

PREFILL_SHARE = 0.25
CONTENDED_SHARE = 0.25
"""Part of the budget that a step has while several tenants share the engine."""
DYNAMIC_THRESHOLD = 8
"""While several tenants share the engine, a tenant gets another place, or more slots for a waiting request, only if it has less
than this many times the number of free ones. Source: Choudhury and Hahne 1998, "Dynamic queue length thresholds for shared-memory
packet switches"; 8 leaves a ninth free beside one flood."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of a step."""

    max_batched_tokens: int
    """Tokens a step, decoding branches included; a :data:`CONTENDED_SHARE` of it while several tenants share the engine."""
    max_running_requests: int
    """Requests admitted at once."""


class Scheduler:
    """Turns requests into batches. It knows neither tensors nor clients."""

    def __init__(
        self,
        pool: SlotPool,
        budget: Budget,
        clock: Callable[[], float] = time.monotonic,
        *,
        run_ahead: bool = False,
        lenvm_pool: SlotPool | None = None,
    ) -> None:
        """``lenvm_pool``: slots of the length model, if there is one."""
        pools = [each for each in (pool, lenvm_pool) if each is not None]
        self._queue = FairQueue(len(pools), clock)
        self._allocator = Allocator(pools, self._queue)
        self._composer = StepComposer(self._allocator, run_ahead=run_ahead)
        self._running = self._allocator.running
        self._budget = budget
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self.items = 0
        """Requests that are items and have not ended."""
        self._closed_above = math.inf
        """For this step, tenants that hold at least this many slots for their weight admit nothing, because a tenant that
        holds no more found too few slots for its next request.
        """
        self._expiring: list[tuple[float, int, Request]] = []
        self._wait_estimator = WaitEstimator(clock)

    @property
    def kv_pools(self) -> list[KVPool]:
        """Slots and prefix cache of the base model and, if there is one, of the length model."""
        return self._allocator.kv_pools

    @property
    def pool(self) -> SlotPool:
        """Slots of the base model."""
        return self.kv_pools[0].pool

    @property
    def cache(self) -> PrefixCache:
        """Prefix cache of the base model."""
        return self.kv_pools[0].cache

    def add(self, request: Request) -> None:
        """Queue a request that has been checked. Its id is not in use."""
        self._requests[request.id] = request
        self.items += request.is_item
        self._queue.join(request)
        self._wait_estimator.enter(request)
        if request.expires is not None:
            heapq.heappush(self._expiring, (request.expires, request.arrival, request))

    def get(self, request_id: str) -> Request | None:
        """Return the request with this id, or None if it has ended."""
        return self._requests.get(request_id)

    @property
    def idle(self) -> bool:
        """Whether there is no request."""
        return not self._requests

    @property
    def requests(self) -> list[Request]:
        """All requests that have not ended, in order of arrival."""
        return list(self._requests.values())

    @property
    def running(self) -> list[Request]:
        """All admitted requests, in order of admission."""
        return list(self._running.values())

    @property
    def waiting(self) -> int:
        """Number of requests that are not admitted."""
        return len(self._requests) - len(self._running)

    @property
    def _free_places(self) -> int:
        return self._budget.max_running_requests - len(self._running) + self._allocator.items_running

    @property
    def waiting_items(self) -> int:
        """Number of requests that are not admitted and are items."""
        return self.items - self._allocator.items_running

    @property
    def tenants(self) -> int:
        """Number of tenants with a request that has not ended."""
        return len(self._queue.flows)

    def wait_seconds(self, priority: int = 0, tenant: str = "") -> float:
        """Expected time until a new request of this tenant and priority begins."""
        return self._wait_estimator.seconds(priority, tenant)

    @property
    def longest_wait(self) -> float:
        """Expected wait at priority 0 of the tenant for which it is longest."""
        return self._wait_estimator.longest()

    def displace(self, caller: wire.Caller) -> Request | None:
        """Remove and return a waiting request, so that a request of ``caller`` can take its place in a full queue.

        It is the newest one of the tenant with most waiting requests for its weight. None if ``caller`` would then have as many.
        """
        longest = max(self._queue.flows.values(), key=lambda flow: len(flow.waiting) / flow.weight, default=None)
        own = self._queue.flows.get(caller.tenant)
        waiting = 0 if own is None else len(own.waiting)
        if longest is None or (waiting + 1) / caller.weight >= len(longest.waiting) / longest.weight:
            return None
        displaced = longest.newest_waiting
        if displaced is not None:
            self.remove(displaced)
        return displaced

    def expire(self) -> list[Request]:
        """Remove the requests whose deadline passed before they were computed; returns them. Generations that have begun go on."""
        late = []
        while self._expiring and self._expiring[0][0] <= self._clock():
            request = heapq.heappop(self._expiring)[2]
            if self._requests.get(request.id) is request and request.droppable:
                self.remove(request)
                late.append(request)
        return late

    def schedule(self) -> Batch:
        """Return the next step; it is empty only if there is nothing to compute."""
        batch = Batch()
        self._allocator.step += 1
        self._closed_above = math.inf
        contended, shared = self._queue.contended(), self._queue.shared
        tokens = max(1, int(CONTENDED_SHARE * self._budget.max_batched_tokens)) if contended else self._budget.max_batched_tokens
        reserved = self._queue.reserve()
        most = max(tokens, reserved + max(1, int(PREFILL_SHARE * tokens)))
        granted = self._queue.grant(most - reserved)
        if shared:
            for flow in granted:
                self._make_way(batch, flow)
        for request in self.running:
            if request.id in self._running and request.step != self._allocator.step:
                self._go_on(batch, request)
        if shared:
            for flow in granted:
                self._admit_waiting(batch, flow, most, contended=contended)
        self._use_rest(batch, most, contended=contended)
        self._queue.settle(most)
        self._wait_estimator.turn()
        return batch

    def finish(self, branch: Branch) -> None:
        """End a branch. A generation stays in the prefix cache; an item does not, because later requests rarely have it."""
        request = branch.request
        request.branches.remove(branch)
        branch.done = True
        if isinstance(request, GenerateRequest):
            self._allocator.insert_prefix(branch)
        else:
            self._allocator.free(branch)
        if branch.aux_branch is not None:
            branch.aux_branch.request.branches.remove(branch.aux_branch)
            self._allocator.insert_prefix(branch.aux_branch)
        if not request.branches:
            self.remove(request)

    def release_unused(self, candidate_pass: CandidatePass) -> None:
        """Free the slots of a pass that was not computed, because the draw was decided without the length model."""
        self._allocator.release_unused(candidate_pass)

    def remove(self, request: Request) -> None:
        """Remove a request and free everything that it holds."""
        del self._requests[request.id]
        self.items -= request.is_item
        self._wait_estimator.leave(request, begun=False)
        self._allocator.let_go(request)
        self._queue.leave(request)

    def fail(self, batch: Batch) -> list[Request]:
        """Remove the requests of a failed step, and clear the prefix caches, which may have slots that the step did not fill.

        Returns the removed requests; some requests of the batch may have ended since.
        """
        affected = dict.fromkeys(segment.request.main_request for segment in (*batch.segments, *batch.lenvm_segments))
        failed = [request for request in affected if self._requests.get(request.id) is request]
        for request in failed:
            self.remove(request)
        for kv_pool in self.kv_pools:
            kv_pool.cache.clear()
        return failed

    def _go_on(self, batch: Batch, request: Request) -> None:
        """Compute a running request: its decoding branches, and other tokens within the share of its tenant."""
        flow, reserve = self._queue.of(request), request.reserve
        room = flow.room + reserve
        flow.room = room - self._serve(batch, request, room, may_preempt=True)

    def _serve(self, batch: Batch, request: Request, room: int, *, may_preempt: bool) -> int:
        """Compute up to ``room`` tokens of a request; returns how many."""
        before = batch.load
        self._composer.compute(batch, request, room, may_preempt=may_preempt)
        spent = batch.load - before
        if spent:
            request.step = self._allocator.step
            self._queue.of(request).spent += spent
        return spent

    def _admit_waiting(self, batch: Batch, flow: Flow, most: int, *, contended: bool) -> None:
        """Start waiting requests of a tenant while it has a share of the step, and while there are places and slots."""
        while flow.waiting and flow.room > 0 and batch.load < most:
            if not self._has_room(flow, contended=contended):
                return
            if not self._admit(batch, flow, min(flow.room, most - batch.load)):
                self._closed_above = min(self._closed_above, flow.holding)
                return

    def _has_room(self, flow: Flow, *, contended: bool) -> bool:
        """Whether there is a running place for a tenant, with which it leaves enough places and slots to others."""
        free = self._free_places
        if not contended or free <= 0:
            return free > 0
        available = [kv_pool.pool.available + kv_pool.cache.evictable for kv_pool in self.kv_pools]
        shares = zip((len(flow.running), *flow.held), (free, *available), strict=True)
        return flow.holding < self._closed_above and all(own == 0 or own < DYNAMIC_THRESHOLD * left for own, left in shares)

    def _use_rest(self, batch: Batch, most: int, *, contended: bool) -> None:
        """Give the rest of the step to flows that can use it, those furthest behind first."""
        if batch.load >= most:
            return
        for flow in self._queue.dealt:
            if not self._queue.satisfied:
                self._use_rest_of(batch, flow, most)
            flow.room = most - batch.load
            self._admit_waiting(batch, flow, most, contended=contended)
        for flow in self._queue.others():
            if batch.load >= most or self._free_places <= 0 or self._closed_above <= 0:
                return
            flow.room = most - batch.load
            self._admit_waiting(batch, flow, most, contended=contended)

    def _use_rest_of(self, batch: Batch, flow: Flow, most: int) -> None:
        """Compute more tokens of a tenant's running requests than its share. A request that is already in the step preempts
        nothing, because it might take slots of its own branches, and a guided request is not added twice."""
        for request in list(flow.running.values()):
            again = request.step == self._allocator.step
            if batch.load < most and request.id in self._running and not (again and len(request.with_aux) > 1):
                self._serve(batch, request, most - batch.load, may_preempt=not again)

    def _admit(self, batch: Batch, flow: Flow, room: int) -> bool:
        """Start the first waiting request of a tenant if at least one of its tokens fits into ``room``."""
        request = self._queue.start(flow)
        self._running[request.id] = request
        self._allocator.items_running += request.is_item
        for part in request.with_aux:
            part.node = self._allocator.kv_pool(part).cache.enter(part.salt)
        spent = self._serve(batch, request, room, may_preempt=False)
        if not spent:
            self._allocator.preempt(request)
            return False
        flow.room -= spent
        for part in request.with_aux:
            part.begun = True
        if request.first_computed is None:
            request.first_computed = self._clock()
        self._wait_estimator.leave(request, begun=True)
        return True

    def _make_way(self, batch: Batch, flow: Flow) -> None:
        """Admit the next request of a tenant that has a share of the step but lacks a running place or slots.

        They come from tenants that have more for their weight. The request is admitted before the running ones are computed, which
        would take these slots.
        """
        if not flow.waiting:
            return
        if self._free_places <= 0:
            victim = self._allocator.victim_for_place(flow)
            victims = [] if victim is None else [victim]
        else:
            request = flow.waiting[0][2]
            found = [self._allocator.victims_for_slots(flow, part) for part in request.with_aux]
            victims = [] if None in found else list(dict.fromkeys(itertools.chain.from_iterable(filter(None, found))))
        for victim in victims:
            self._allocator.preempt(victim)
        if victims:
            self._admit(batch, flow, flow.room)
