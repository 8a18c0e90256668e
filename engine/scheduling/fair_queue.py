"""Weighted fair queueing between tenants, and the order of requests within a tenant.

A flow is all that one tenant has at the engine: its waiting and its running requests. It exists from its first request to the end
of its last one. Flows that want more than there is share the tokens of each step in proportion to their weights; what one flow
does not want goes to the others.

Method: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with quanta of tokens for packets. The virtual time of a flow
is the number of tokens computed for it, divided by its weight; quanta go to the flow with the smallest virtual time. Counting
tokens that were computed, decoded ones included, follows the Virtual Token Counter ("Fairness in Serving Large Language Models",
Sheng et al., OSDI 2024, arXiv 2401.00588).

Invariants:

- A flow that wants a token gets at least ``weight / sum of weights`` of a step, to within one quantum, or all that it wants.
- Nobody saves up credit: a flow that returns, or that could not use its share for want of slots or places, goes on at the virtual
  time of the system.
- Debt is bounded: no flow is further ahead of the system than one step of its own.
- A flow without requests has no state, except its virtual time where it left in debt: of the last :data:`REMEMBERED` flows, so
  that leaving between two requests does not pay.
- With one flow there is nothing to divide, and the virtual time of the system is that of this flow. When the last flow ends, the
  count starts again.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.core import Request

AGING_SECONDS = 5.0
"""A request of priority p is served like one of priority 0 that came p times this later."""
MAX_PRIORITY = 10
"""Priorities beyond this, up or down, count as this: no request overtakes one that came 100 s before it."""
QUANTA = 8
"""A step's share of prompt tokens is dealt out in so many parts."""
CONTENDED_SECONDS = 10.0
"""Time for which the engine stays ready for a second tenant after one has left; a tenant often sends one request after another."""
REMEMBERED = 1024


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
    running: dict[str, Request] = field(default_factory=dict)
    """In order of admission."""
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
        """The last waiting request that has not begun; those that have begun were preempted, and go on later."""
        return next((request for _, _, request in reversed(self.waiting) if not request.begun), None)


class FairQueue:
    """Divides tokens between all flows and orders their requests. The scheduler acts on it.

    A step costs time for each flow that has running requests or gets a share of the step, not for each flow.
    """

    def __init__(self, kv_pools: int, clock: Callable[[], float] = time.monotonic) -> None:
        """kv_pools: number of models with slots of their own."""
        self.flows: dict[str, Flow] = {}
        """All flows, by tenant."""
        self.working: dict[str, Flow] = {}
        """Flows with running requests, by tenant."""
        self.weight = 0.0
        """Sum of the weights of all flows."""
        self.satisfied = True
        """Whether the step has room for all demand."""
        self._lanes = kv_pools
        self._clock = clock
        self._numbers = itertools.count()
        self._virtual = 0.0
        """Virtual time of the system: the start of the last quantum dealt. No flow with unmet demand is behind it."""
        self._ready: list[tuple[float, int, Flow]] = []
        """A heap of the flows that only wait, by the virtual time at which they began to; entries of others are skipped."""
        self._dealt: list[Flow] = []
        """Flows whose demand was asked for this step."""
        self._debts: OrderedDict[str, float] = OrderedDict()
        """Virtual times of flows that have left ahead of the system."""
        self._contended_until = 0.0

    def of(self, request: Request) -> Flow:
        """The flow of a request that has not ended."""
        return self.flows[request.caller.tenant]

    @property
    def shared(self) -> bool:
        """Whether there is more than one flow."""
        return len(self.flows) > 1

    def contended(self) -> bool:
        """Whether several flows share the engine, or did within the last :data:`CONTENDED_SECONDS`."""
        if len(self.flows) > 1:
            self._contended_until = self._clock() + CONTENDED_SECONDS
            return True
        return self._contended_until > 0 and self._clock() < self._contended_until

    def join(self, request: Request) -> None:
        """Put a new request among the waiting of its flow, which is made where there is none."""
        tenant, weight = request.caller.tenant, request.caller.weight
        flow = self.flows.get(tenant)
        if flow is None:
            virtual = max(self._virtual, self._debts.pop(tenant, 0.0))
            flow = self.flows[tenant] = Flow(tenant, next(self._numbers), [0] * self._lanes, 0.0, virtual)
        self.weight += weight - flow.weight
        flow.weight = weight
        self.wait(request)

    def wait(self, request: Request) -> None:
        """Put a request among the waiting of its flow."""
        flow = self.of(request)
        insort(flow.waiting, (rank(request), request.arrival, request))
        flow.waiting_tokens += request.size
        self._make_ready(flow)

    def start(self, flow: Flow) -> Request:
        """Move the first waiting request of a flow to its running ones."""
        _, _, request = flow.waiting.pop(0)
        flow.waiting_tokens -= request.size
        flow.running[request.id] = request
        self.working[flow.tenant] = flow
        return request

    def stop(self, request: Request) -> None:
        """Take the request from the running ones, if it is among them."""
        flow = self.of(request)
        if flow.running.pop(request.id, None) is not None and not flow.running:
            del self.working[flow.tenant]
            flow.reserved = 0
            self._make_ready(flow)

    def leave(self, request: Request) -> None:
        """Remove a request that has ended and does not run."""
        flow = self.of(request)
        place = bisect_left(flow.waiting, (rank(request), request.arrival))
        if place < len(flow.waiting) and flow.waiting[place][2] is request:
            del flow.waiting[place]
            flow.waiting_tokens -= request.size
        if not flow.waiting and not flow.running:
            self._drop(flow)

    def reserve(self) -> int:
        """Begin a step: note what each flow's decoding branches need; returns the sum."""
        total = 0
        for flow in self.working.values():
            flow.reserved = sum(request.reserve for request in flow.running.values())
            total += flow.reserved
        return total

    def grant(self, room: int) -> list[Flow]:
        """Divide the step's ``room`` beside decoding branches into shares, :attr:`Flow.room`.

        Returns the flows that have one, those furthest behind first.
        """
        if not self.shared:
            self.satisfied = True
            for flow in self.flows.values():
                flow.room, flow.virtual = room, self._virtual
            return list(self.flows.values())
        self._dealt = list(self.working.values())
        heap = []
        for flow in self._dealt:
            flow.virtual = max(flow.virtual, self._virtual)
            heap.append((flow.virtual + flow.reserved / flow.weight, flow.holding, flow.number, flow))
            flow.room = 0
        heapq.heapify(heap)
        return self._deal(heap, room)

    @property
    def dealt(self) -> list[Flow]:
        """Flows that may use the rest of the step, those furthest behind first: all whose demand was asked for."""
        if not self.shared:
            return list(self.flows.values())
        return sorted(self._dealt, key=lambda flow: flow.virtual + flow.spent / flow.weight)

    def others(self) -> Iterator[Flow]:
        """Waiting flows whose demand was not asked for."""
        for _ in range(len(self._ready) if self.shared else 0):
            flow = self._next_ready(math.inf)
            if flow is None:
                return
            yield flow

    def settle(self, most: int) -> None:
        """End a step of at most ``most`` tokens: charge each flow the tokens that were computed for it."""
        dealt = self._dealt if self.shared else list(self.flows.values())
        for flow in dealt:
            if flow.spent:
                flow.virtual = min(flow.virtual + flow.spent / flow.weight, self._virtual + most / flow.weight)
                flow.spent = 0
            self._make_ready(flow)
        if self.satisfied:
            self._virtual = max([self._virtual, *(flow.virtual for flow in dealt)])

    def _deal(self, heap: list[tuple[float, float, int, Flow]], room: int) -> list[Flow]:
        limit, quantum, wanted = room, max(1, room // QUANTA), dict[Flow, int]()
        while room > 0:
            waiting = self._next_ready(heap[0][0] if heap else math.inf)
            if waiting is not None:
                heapq.heappush(heap, (waiting.virtual, waiting.holding, waiting.number, waiting))
            elif not heap:
                break
            virtual, holding, number, flow = heapq.heappop(heap)
            if flow not in wanted:
                wanted[flow] = flow.demand(limit)
            share = min(quantum, wanted[flow] - flow.room, room)
            if share > 0:
                self._virtual = max(self._virtual, virtual)
                flow.room += share
                room -= share
                heapq.heappush(heap, (virtual + share / flow.weight, holding, number, flow))
        self.satisfied = room > 0
        return [flow for flow in wanted if flow.room > 0]

    def _next_ready(self, before: float) -> Flow | None:
        """The waiting flow that is furthest behind, if it is further behind than ``before``."""
        while self._ready and max(self._ready[0][0], self._virtual) < before:
            flow = heapq.heappop(self._ready)[2]
            flow.ready = False
            if flow.waiting and not flow.running:
                flow.virtual = max(flow.virtual, self._virtual)
                flow.room = 0
                self._dealt.append(flow)
                return flow
        return None

    def _make_ready(self, flow: Flow) -> None:
        if flow.ready or flow.running or not flow.waiting:
            return
        if len(self._ready) > 2 * len(self.flows) + 64:
            self._ready = [(other.virtual, other.number, other) for other in self.flows.values() if other.ready]
            heapq.heapify(self._ready)
        flow.ready = True
        heapq.heappush(self._ready, (flow.virtual, flow.number, flow))

    def _drop(self, flow: Flow) -> None:
        del self.flows[flow.tenant]
        self.weight -= flow.weight
        if not self.flows:
            self._virtual = self.weight = 0.0
            self._debts.clear()
        elif flow.virtual > self._virtual:
            self._debts[flow.tenant] = flow.virtual
            if len(self._debts) > REMEMBERED:
                self._debts.popitem(last=False)


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
