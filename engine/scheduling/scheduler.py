"""Fills each step with tokens, up to one budget that scoring and decoding share.

Order within a tenant: running requests come first, in order of admission. Each decoding branch gets its one token; prompts and
items get the rest of the budget. Waiting requests are admitted in the order of :func:`~engine.scheduling.fair_queue.rank`, which is
the time of arrival, corrected by priority. While there is a request with a priority other than 0, running requests get their tokens
in this order too, and a waiting request is admitted before running prompts and items of a higher rank get theirs. A running request
that finds no free slot evicts from the prefix cache, then preempts the request that was admitted last; the preempted tokens are
computed again later. A waiting request only evicts from the cache. So the request that was admitted first finds slots. Neither
scoring nor decoding starves: every generated sequence gets its token in every step, and prompts and items get at least a
:data:`PREFILL_SHARE` of the budget.

Between tenants, resources are divided by weight:

- *Tokens of a step*: :mod:`engine.scheduling.fair_queue` divides the tokens that decoding leaves. Tokens that a tenant cannot use
  go to the others.
- *Length of a step*: while several tenants share the engine, steps have a :data:`CONTENDED_SHARE` of the budget, because a new
  request waits for the step in progress, and a flood of requests fills every step.
- *Running requests and slots*: a tenant takes them from requests of tenants that have more for their weight
  (:mod:`engine.scheduling.allocation`), and leaves room for the others (:data:`~engine.scheduling.admission.DYNAMIC_THRESHOLD`).
- *Queue places*: see :meth:`Scheduler.displace`.

With one tenant none of these rules applies.

With forecasts, a generation first waits as a score of the length model (:func:`~engine.requests.generation.forecast_of`), which
comes before all other requests of its tenant.

The scheduler computes running requests, and :mod:`engine.scheduling.admission` starts waiting ones.
:mod:`engine.scheduling.composer` adds their tokens to the step, and :mod:`engine.scheduling.allocation` allocates and frees their
slots. A length model has slots of its own.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from yardstick_llm.engine import wire
from yardstick_llm.engine.kvcache.prefix_cache import PrefixCache, SlotPool
from yardstick_llm.engine.requests.batch import Batch
from yardstick_llm.engine.requests.core import Branch, ItemGroup, Request, ScoringRequest
from yardstick_llm.engine.requests.generation import GenerateRequest, forecast_of
from yardstick_llm.engine.scheduling.admission import Admission
from yardstick_llm.engine.scheduling.allocation import Allocator, KVPool
from yardstick_llm.engine.scheduling.composer import StepComposer, decode, decoding_branch
from yardstick_llm.engine.scheduling.drafting import Drafting, LookupSettings
from yardstick_llm.engine.scheduling.fair_queue import FairQueue, WaitEstimator, rank
from yardstick_llm.engine.settings import RESERVED_SHARE

FEW = 64


class Deadlines:
    """The requests that have a deadline. It refers to them by id, so that it keeps no request that has ended: most end long before
    their deadline, and each has its prompt."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        """``requests``: those that have not ended, by id."""
        self._requests = requests
        self._heap: list[tuple[float, int, str]] = []
        """Deadline, arrival and id."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Note the deadline of a request, if it has one."""
        if request.expires is None:
            return
        heapq.heappush(self._heap, (request.expires, request.arrival, request.id))
        if len(self._heap) > 2 * len(self._requests) + FEW:
            self._heap = [entry for entry in self._heap if self._of(entry) is not None]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> list[Request]:
        """Forget the deadlines at ``now`` or before, and return their requests."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            request = self._of(heapq.heappop(self._heap))
            if request is not None:
                late.append(request)
        return late

    def _of(self, entry: tuple[float, int, str]) -> Request | None:
        """The request of an entry; None if it has ended. A later request may have its id."""
        _, arrival, request_id = entry
        request = self._requests.get(request_id)
        return request if request is not None and request.arrival == arrival else None


PREFILL_SHARE = CONTENDED_SHARE = 0.25
"""Part of the budget for prompts and items, and the part that a step has while several tenants share the engine."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of a step."""

    max_batched_tokens: int
    """Tokens a step, decoding branches included; a :data:`CONTENDED_SHARE` of it while several tenants share the engine."""
    max_running_requests: int
    """Requests admitted at once."""
    reserved_share: float = RESERVED_SHARE
    """Part of the slots that items leave to others: :attr:`engine.settings.EngineSettings.reserved_share`."""
    max_adapters: int = 0
    """Distinct adapters of a step; 0 where the engine has none."""


class Scheduler:
    """Turns requests into batches. It knows neither tensors nor clients."""

    def __init__(
        self,
        pool: SlotPool | None,
        budget: Budget,
        clock: Callable[[], float] = time.monotonic,
        *,
        run_ahead: bool = False,
        lenvm_pool: SlotPool | None = None,
        lookup: LookupSettings | None = None,
        forecasts: bool = False,
    ) -> None:
        """``pool``: None where tokens have no slots. ``lenvm_pool``: slots of the length model, if there is one. ``lookup``: None
        for no drafts. ``forecasts``: generations wait for a forecast of their length, which takes no running place."""
        pools = [each for each in (pool, lenvm_pool) if each is not None]
        self.queue = FairQueue(len(pools), clock)
        self.allocator = Allocator(pools, self.queue, budget.reserved_share, budget.max_adapters)
        self._composer = StepComposer(self.allocator, run_ahead=run_ahead)
        self.drafting = Drafting(self.allocator, lookup or LookupSettings(rows=0))
        self._run_ahead = run_ahead
        self._forecasts = forecasts
        self._running = self.allocator.running
        self._budget = budget
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._deadlines = Deadlines(self._requests)
        self.wait_estimator = WaitEstimator(clock)
        self._admission = Admission(budget.max_running_requests, self.queue, self.allocator, self._composer, self.wait_estimator)

    @property
    def kv_pools(self) -> list[KVPool]:
        """Slots and prefix cache of the base model and, if there is one, of the length model."""
        return self.allocator.kv_pools

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
        self.drafting.prepare(request)
        if self._forecasts and isinstance(request, GenerateRequest):
            request.forecast = forecast_of(request)
        self.queue.join(_queued(request))
        self.wait_estimator.add(request)
        self._deadlines.add(request)

    def get(self, request_id: str) -> Request | None:
        """Return the request with this id; None if it has ended."""
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
    def slot_counts(self) -> dict[str, int]:
        """Fields of :class:`engine.wire.Stats` about slots, and items in them."""
        return {
            "slots_total": self.pool.size,
            "slots_free": self.pool.available,
            "slots_cached": self.cache.evictable,
            "slots_items": self.cache.item_tokens,
            "slots_reserved": self.allocator.reserved(self.pool),
            "evicted_item_tokens": self.cache.evicted_item_tokens,
        }

    @property
    def waiting(self) -> int:
        """Number of requests of which something is not admitted."""
        return self.queue.waiting

    def displace(self, caller: wire.Caller, above: float = 0.0) -> Request | None:
        """Remove and return a waiting request, so that a request of ``caller`` can take its place in a full queue.

        See :meth:`~engine.scheduling.fair_queue.FairQueue.displaceable`. None if there is none.
        """
        displaced = self.queue.displaceable(caller, above)
        if displaced is None:
            return None
        self.remove(displaced.accepted)
        return displaced.accepted

    def expire(self) -> list[Request]:
        """Remove the requests whose deadline passed before they were computed; returns them. Generations that have begun go on."""
        late = [request for request in self._deadlines.passed(self._clock()) if request.droppable]
        for request in late:
            self.remove(request)
        return late

    def schedule(self) -> Batch:
        """Return the next step; it is empty only if there is nothing to compute."""
        batch = Batch()
        now = self._clock()
        self.allocator.step += 1
        self.allocator.turns.begin(chain(self._running.values(), self.queue.heads))
        contended, shared = self.queue.contended(), self.queue.shared
        budget = max(1, int(CONTENDED_SHARE * self._budget.max_batched_tokens)) if contended else self._budget.max_batched_tokens
        decode_tokens = self.queue.reserve()
        self.drafting.begin(decode_tokens)
        max_load = max(budget, decode_tokens + max(1, int(PREFILL_SHARE * budget)))
        granted = self.queue.grant(max_load - decode_tokens)
        self._admission.begin(max_load, now, contended=contended)
        if shared:
            for flow in granted:
                self._admission.admit_by_preemption(batch, flow)
        self._compute_running(batch)
        if shared:
            for flow in granted:
                self._admission.admit_waiting(batch, flow)
        self._admission.use_rest(batch)
        self.queue.settle(max_load)
        self.wait_estimator.turn()
        return batch

    def finish(self, branch: Branch) -> None:
        """End a branch. A generation stays in the prefix cache; an item does not, because later requests rarely have it."""
        request = branch.request
        request.branches.remove(branch)
        branch.done = True
        if isinstance(request, GenerateRequest):
            self.allocator.insert_prefix(branch)
        else:
            self.allocator.free(branch)
        if branch.aux_branch is not None:
            branch.aux_branch.request.branches.remove(branch.aux_branch)
            self.allocator.insert_prefix(branch.aux_branch)
        if not request.branches:
            self.remove(request)

    def take_forecast(self, forecast: ScoringRequest, expected: float, delay: float) -> None:
        """End a forecast of ``expected`` tokens, and queue its generation, as if it had come ``delay`` seconds later."""
        request = forecast.forecasts
        assert isinstance(request, GenerateRequest)
        request.forecast, request.expected_tokens, request.delay = None, expected, delay
        self.queue.join(request)
        self._stop(forecast)
        self.queue.leave(forecast)

    def finish_items(self, part: Request) -> None:
        """End a request of a group of items, or a block of it, whose results are there."""
        assert part.group is not None
        self._stop(part)
        part.group.end(part)

    def remove(self, request: Request) -> None:
        """Remove a request and free everything that it holds. Results of its branches are no longer wanted."""
        del self._requests[request.id]
        self.wait_estimator.remove(request)
        request = _queued(request)
        for part in request.parts.values() if isinstance(request, ItemGroup) else [request]:
            self._stop(part)
        self.queue.leave(request)

    def _stop(self, request: Request) -> None:
        for branch in request.branches:
            branch.done = True
        self.allocator.release(request)

    def fail(self, batch: Batch) -> list[Request]:
        """Remove the requests of a failed step, and clear the prefix caches, which may have slots that the step did not fill.

        Returns the removed requests; some requests of the batch may have ended since.
        """
        affected = dict.fromkeys(request.accepted for request in batch.requests)
        failed = [request for request in affected if self._requests.get(request.id) is request]
        for request in failed:
            self.remove(request)
        for work in batch.images:
            work.cache.forget(work)
        for kv_pool in self.kv_pools:
            kv_pool.cache.clear()
        return failed

    def _compute_running(self, batch: Batch) -> None:
        """Compute the running requests in order of admission or, with priorities, of rank. Consecutive ones that continue by one
        token are composed at once."""
        decoding: list[Branch] = []
        ranked = self.queue.prioritised > 0
        for request in sorted(self.running, key=rank) if ranked else self.running:
            if request.awaits_result or (request.adapter is not None and not self.allocator.turns.takes(request)):
                continue
            if self._run_ahead and self.drafting.holds(request):
                continue
            branch = decoding_branch(request, run_ahead=self._run_ahead) if request.step != self.allocator.step else None
            if branch is None or self.drafting.wants(branch):
                self._decode(batch, decoding)
                decoding = []
                if ranked and request.arrival in self._running:
                    self._admission.admit_waiting(batch, self.queue.of(request), before=rank(request))
                self._compute_request(batch, request)
            else:
                decoding.append(branch)
        self._decode(batch, decoding)

    def _decode(self, batch: Batch, branches: Sequence[Branch]) -> None:
        if branches and not decode(batch, branches, self.allocator):
            for branch in branches:
                self._compute_request(batch, branch.request)

    def _compute_request(self, batch: Batch, request: Request) -> None:
        """Compute a running request, unless it was preempted or is in the step already: its decoding branches, and other tokens
        within the share of its tenant."""
        if request.step == self.allocator.step or request.arrival not in self._running:
            return
        flow, reserve, first = self.queue.of(request), request.reserve, len(batch.segments)
        flow.room += reserve
        flow.room -= self._composer.compute(batch, flow, request, flow.room, reserve, may_preempt=True)
        self.drafting.extend(batch, flow, first)


def _queued(request: Request) -> Request:
    """Return what is queued for a request: its forecast, while there is one."""
    return request.forecast if isinstance(request, GenerateRequest) and request.forecast is not None else request
