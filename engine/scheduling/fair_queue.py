"""Weighted fair queueing between tenants.

A :class:`Flow` has the waiting and running requests of one tenant. It exists from the first request of
the tenant to the end of the last one. Flows whose demand exceeds the tokens of a step share them in proportion to their weights;
tokens that a flow does not need go to the others.

Method: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with quanta of tokens as packets. The virtual time of a flow
is the number of tokens computed for it, divided by its weight; quanta go to the flow with the smallest virtual time. Counting
computed tokens, decoded ones included, follows the Virtual Token Counter ("Fairness in Serving Large Language Models",
Sheng et al., OSDI 2024, arXiv 2401.00588).

Invariants:

- A flow with demand gets at least ``weight / sum of weights`` of a step, to within one quantum, or its whole demand.
- A flow saves no credit: a flow that returns, or that could not use its share for lack of slots or places, continues at the virtual
  time of the system.
- Debt is bounded: no flow is further ahead of the system than one step of its own.
- A flow without requests has no state, except its virtual time if it left in debt. The queue keeps this for the last
  :data:`REMEMBERED` flows, so a tenant gains nothing by leaving between two requests.
- With one flow nothing is divided, and the virtual time of the system is that of this flow. When the last flow ends, the count
  starts again.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from yardstick_llm.engine import wire
from yardstick_llm.engine.requests.core import ItemBlock, ItemGroup, Request, ScoringRequest

AGING_SECONDS = 5.0
"""A request of priority p is served like one of priority 0 that arrived p times this later."""
MAX_PRIORITY = 10
"""Priorities beyond ±this value count as this value, so no request overtakes one that arrived more than 100 s before it."""


def clamped(priority: int) -> int:
    """``priority`` within :data:`MAX_PRIORITY`."""
    return min(max(priority, -MAX_PRIORITY), MAX_PRIORITY)


def rank(request: Request) -> float:
    """Sort key of a request within its tenant, lowest first.

    It never changes while the request waits. Requests still age, because each second newer requests get a rank that is higher by
    one.
    """
    return request.received + AGING_SECONDS * clamped(request.priority) + request.delay


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
    waiting_first: bool = False
    """Whether its next turn is that of a waiting request, where whole sequences are computed (:mod:`engine.scheduling.whole`)."""
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


QUANTA = 8
"""Number of quanta into which a step's share of prompt tokens is divided."""
CONTENDED_SECONDS = 10.0
"""Time for which the engine stays ready for a second tenant after one has left; a tenant often sends one request after another."""
REMEMBERED = 1024


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
        self.waiting = 0
        """Number of waiting requests."""
        self.prioritised = 0
        """Number of requests with a priority other than 0."""
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

    @property
    def heads(self) -> Iterator[Request]:
        """The first waiting request of each flow."""
        return (flow.waiting[0][2] for flow in self.flows.values() if flow.waiting)

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
        self.prioritised += request.priority != 0
        self.wait(request)

    def wait(self, request: Request) -> None:
        """Put a request among the waiting of its flow. An item that was preempted waits in its group."""
        flow, group = self.of(request), request.group
        if group is not None:
            assert isinstance(request, ScoringRequest)
            group.take_back(request)
        if group is None or len(group.waiting) == 1:
            waiting = group or request
            insort(flow.waiting, (rank(waiting), waiting.arrival, waiting))
            self.waiting += 1
        flow.waiting_tokens += request.size
        self._make_ready(flow)

    def start(self, flow: Flow, block: ItemBlock | None = None) -> Request:
        """Move the first waiting request of a flow, or a ``block`` of it, to the running ones."""
        waiting = flow.waiting[0][2]
        request = waiting.first if block is None else block
        if not (isinstance(waiting, ItemGroup) and waiting.start(request)):
            del flow.waiting[0]
            self.waiting -= 1
        flow.waiting_tokens -= request.size
        flow.running[request.arrival] = request
        self.working[flow.tenant] = flow
        return request

    def stop(self, request: Request) -> None:
        """Take the request from the running ones, if it is among them."""
        flow = self.of(request)
        if flow.running.pop(request.arrival, None) is not None and not flow.running:
            del self.working[flow.tenant]
            flow.reserved = 0
            self._make_ready(flow)

    def displaceable(self, caller: wire.Caller, above: float = 0.0) -> Request | None:
        """Return the newest waiting request of the tenant with most waiting requests for its weight.

        None if ``caller`` would have as many with one more, or if the tenant has no more than ``above``.
        """
        longest = max(self.flows.values(), key=lambda flow: len(flow.waiting) / flow.weight, default=None)
        own = self.flows.get(caller.tenant)
        waiting = 0 if own is None else len(own.waiting)
        if longest is None or max((waiting + 1) / caller.weight, above) >= len(longest.waiting) / longest.weight:
            return None
        return longest.newest_waiting

    def leave(self, request: Request) -> None:
        """Remove a request that has ended and does not run."""
        flow = self.of(request)
        self.prioritised -= request.priority != 0
        place = bisect_left(flow.waiting, (rank(request), request.arrival))
        if place < len(flow.waiting) and flow.waiting[place][2] is request:
            del flow.waiting[place]
            self.waiting -= 1
            flow.waiting_tokens -= request.size
        if not flow.waiting and not flow.running:
            self._drop(flow)
        request.adapter = None  # whose memory is freed when it was unloaded
        for part in request.with_aux:
            part.images = None  # with their pixels
        if isinstance(request, ItemGroup):
            request.item_images = None

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
    """Estimates queue time from the waiting requests and the pace of the queue.

    The pace is the number of tokens begun in each second, in steps during which requests waited. Only then is the engine as fast as
    it can be, whatever slows it down. The last ten seconds count most.

    A tenant waits for its own requests only, at its share of the pace: while its queue of Q tokens is served, another tenant gets
    at most Q tokens times the ratio of their weights, and no more than it has queued (generalised processor sharing).
    """

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
        self._begun, self._computing = 0, 0
        """Tokens begun since that step, and in it."""
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
            self._moved = kept * self._moved + self._computing
            self._seconds = kept * self._seconds + now - self._turned
        self._turned = now if self._sizes else None
        self._computing, self._begun = self._begun, 0

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
